"""Owns what PyTorch users touch. Does not know how updates travel.

Start reading at `join`.
"""

from atoll.torch.build import build
from atoll.torch.from_run import from_run
from atoll.torch.island import Evaluation, Island
from atoll.torch.join import join
from atoll.torch.lr_schedule import WSD
from atoll.torch.model import Stage
from atoll.torch.shard import shard
from atoll.torch.store_all_reduce import StoreAllReduce

__all__ = [
    "WSD",
    "Evaluation",
    "Island",
    "Stage",
    "StoreAllReduce",
    "build",
    "from_run",
    "join",
    "shard",
]
