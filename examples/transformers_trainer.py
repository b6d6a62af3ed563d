"""`transformers.Trainer` as an island. It resumes after a kill.

atoll join URL --island north -- examples/transformers_trainer.py north
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from atoll.integrations.transformers import IslandCallback, newest

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def make_model() -> LlamaForCausalLM:
    """Return a small language model with fixed initial weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=4, **SIZES))


def make_dataset(count: int) -> list[dict[str, torch.Tensor]]:
    """Return token sequences: a random start and a random stride of 1 to 4."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(32, (count, 1), generator=generator)
    stride = torch.randint(1, 5, (count, 1), generator=generator)
    tokens = (start + stride * torch.arange(8)) % 32
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(output: str) -> None:
    """Train until the run ends, then print the loss and the digest."""
    callback = IslandCallback()
    args = TrainingArguments(output, max_steps=10**6, save_steps=10, save_total_limit=2)
    args.learning_rate, args.report_to, args.disable_tqdm = 3e-3, [], True
    datasets = {"train_dataset": make_dataset(4096), "eval_dataset": make_dataset(64)}
    trainer = Trainer(make_model(), args, **datasets)
    callback.attach(trainer)
    trainer.train(resume_from_checkpoint=newest(output))
    loss = trainer.evaluate()["eval_loss"]
    print(f"loss {loss:.4f}, digest {callback.island.digest}")


if __name__ == "__main__":
    main(sys.argv[1])
