"""Owns `transformers` in a run: a Trainer as an island, and models from bundles.

Does not know how updates or bundles travel, nor the consent to run a bundle's code.
Start reading at `callback`, then `checkpoint`: the island in a trainer's checkpoints.
`model` makes models and tokenizers from a run's bundle.
"""

from atoll.integrations.transformers.callback import IslandCallback
from atoll.integrations.transformers.checkpoint import newest
from atoll.integrations.transformers.model import (
    make_model,
    saved_names,
    tokenizer_from_run,
)

__all__ = [
    "IslandCallback",
    "make_model",
    "newest",
    "saved_names",
    "tokenizer_from_run",
]
