"""Owns what PyTorch users touch. Does not know how updates travel.

Start reading at `join`.
"""

from atoll.torch.island import Evaluation, Island
from atoll.torch.join import join
from atoll.torch.shard import shard

__all__ = ["Evaluation", "Island", "join", "shard"]
