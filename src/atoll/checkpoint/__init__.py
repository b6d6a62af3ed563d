"""Owns what a training is resumed from, on disk. Does not know what a tensor is.

Start reading at `saving.save` and `loading.load`, then `manifest` and `tree`.
"""

from atoll.checkpoint.components import COMPONENTS
from atoll.checkpoint.discovery import Found, newest
from atoll.checkpoint.faces import Stateful
from atoll.checkpoint.loading import Loaded, load
from atoll.checkpoint.policy import Policy
from atoll.checkpoint.ranks import Ranks
from atoll.checkpoint.saving import Saver, save

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
