"""On what terms a fragment is exchanged.

Parameters go by the run's settings; buffers are plainly averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from atoll.settings import OuterSection, RunSettings, WireSection
from atoll.weights.layout import FragmentLayout
from atoll.wire import Codec, OuterValues, codec


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Codecs both ways, and what becomes of the mean."""

    up: Codec
    down: Codec
    merge: str
    has_feedback: bool
    """Whether the island keeps what its codec leaves over."""

    is_weighted: bool
    """Whether an update's weight is its tokens; else it is 1."""

    outer: OuterValues
    """The exact fp32 values of the open round."""


def terms_of(layout: FragmentLayout, settings: RunSettings) -> Terms:
    """Return the terms of one fragment of a run."""
    if layout.is_buffers:
        return _buffer_terms(settings.outer)
    return _parameter_terms(settings.outer, settings.wire)


# Every update that comes is judged by them, and a run seldom has others.
@lru_cache(maxsize=64)
def _buffer_terms(outer: OuterSection) -> Terms:
    return Terms(
        up=codec("fp32"),
        down=codec("fp32"),
        merge="mean",
        has_feedback=False,
        is_weighted=outer.weight == "tokens",
        outer=OuterValues(optimizer="sgd", lr=1.0, momentum=0.0),
    )


@lru_cache(maxsize=64)
def _parameter_terms(outer: OuterSection, wire: WireSection) -> Terms:
    return Terms(
        up=codec(wire.up),
        down=codec(wire.down),
        merge=outer.merge,
        has_feedback=wire.error_feedback,
        is_weighted=outer.weight == "tokens",
        outer=OuterValues(
            optimizer=outer.optimizer, lr=outer.lr, momentum=outer.momentum
        ),
    )
