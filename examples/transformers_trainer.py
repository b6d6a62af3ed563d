"""`transformers.Trainer` as an island. Killed and started again, it goes on.

atoll join URL --island north -- examples/transformers_trainer.py north
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from atoll.integrations.transformers import IslandCallback, newest

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def make_model() -> LlamaForCausalLM:
    """Return a small language model, always with the same weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=4, **SIZES))


def make_rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of words that count on by one, two, three or four."""
    numbers = torch.Generator().manual_seed(0)
    first = torch.randint(32, (count, 1), generator=numbers)
    words = first + torch.randint(1, 5, (count, 1), generator=numbers) * torch.arange(8)
    return [{"input_ids": row, "labels": row} for row in words % 32]


def main(output: str) -> None:
    """Train until the run ends, and show what it has come to."""
    callback = IslandCallback()
    args = TrainingArguments(output, max_steps=10**6, save_steps=10, save_total_limit=2)
    args.learning_rate, args.report_to, args.disable_tqdm = 3e-3, [], True
    data = {"train_dataset": make_rows(4096), "eval_dataset": make_rows(64)}
    trainer = Trainer(make_model(), args, **data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=newest(output))
    loss = trainer.evaluate()["eval_loss"]
    print(f"loss {loss:.4f}, digest {callback.island.digest}")


if __name__ == "__main__":
    main(sys.argv[1])
