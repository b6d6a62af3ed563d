"""A member of a gloo all-reduce, for `round.py`.

    _round_gloo.py FILE RANK ISLANDS ELEMENTS DTYPE

The sum alone: nothing is averaged, checked, kept or applied.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from _round_crew import attend


def main() -> None:
    """Reduce when told to."""
    file, rank, islands, elements, dtype = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=int(rank), world_size=int(islands)
    )
    values = torch.ones(int(elements), dtype=getattr(torch, dtype))

    def train() -> None:
        values.fill_(1.0)

    def reduce() -> None:
        dist.all_reduce(values)

    attend({"train": train, "round": reduce})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
