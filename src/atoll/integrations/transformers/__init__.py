"""Owns models and tokenizers that `transformers` makes of a run's bundle.

Does not know how a bundle travels, nor who lets its code run.
Start reading at `definition`.
"""

from atoll.integrations.transformers.definition import (
    make_model,
    saved_names,
    tokenizer_from_run,
)

__all__ = ["make_model", "saved_names", "tokenizer_from_run"]
