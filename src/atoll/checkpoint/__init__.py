"""Owns checkpoints on disk. Does not know the tensors of any framework.

Start reading at `saver.save` and `loader.load`, then `manifest` and `tree`.
"""

from atoll.checkpoint.frameworks import Ranks, Stateful
from atoll.checkpoint.loader import Found, Loaded, load, newest
from atoll.checkpoint.manifest import COMPONENTS
from atoll.checkpoint.saver import Policy, Saver, save

__all__ = [
    "COMPONENTS",
    "Found",
    "Loaded",
    "Policy",
    "Ranks",
    "Saver",
    "Stateful",
    "load",
    "newest",
    "save",
]
