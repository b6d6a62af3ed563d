"""Owns `transformers` beside a run: a Trainer as an island, and what a bundle makes.

Does not know how updates or bundles travel, nor who lets a bundle's code run.
Start reading at `callback`, then `parts`: what its checkpoints hold of an island.
`definition` makes models and tokenizers of a run's bundle.
"""

from atoll.integrations.transformers.callback import IslandCallback
from atoll.integrations.transformers.definition import (
    make_model,
    saved_names,
    tokenizer_from_run,
)
from atoll.integrations.transformers.parts import newest

__all__ = [
    "IslandCallback",
    "make_model",
    "newest",
    "saved_names",
    "tokenizer_from_run",
]
