"""A plain FSDP2 training loop, as in torchtitan: two ranks form one island.

ATOLL_RUN=URL torchrun --nproc-per-node 2 examples/fsdp2_plain.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers_trainer import make_dataset, make_model

import atoll.torch


def main() -> None:
    """Train until the run ends, then print the loss and the digest."""
    dist.init_process_group("gloo")  # "nccl" on GPUs
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with atoll.torch.join(model, optimizer) as island:
        # Each rank gets rows that no other rank of any island gets.
        for batch in atoll.torch.shard(DataLoader(make_dataset(4096), 8), island):
            loss = model(**batch).loss
            loss.backward()
            island.report(tokens=batch["input_ids"].numel(), loss=loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}, digest {island.digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
