"""Owns what people ask of a run in a store: no coordinator answers, so they look.

Does not know how islands meet there. Start reading at `observing`.
"""

from atoll.cli.bucket.observing import Observing

__all__ = ["Observing"]
