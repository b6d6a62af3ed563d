"""What an island holds of one fragment, and of its update in flight."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from atoll.exchange import Frame
from atoll.protocol import How, Position
from atoll.weights import FragmentLayout, FragmentState
from atoll.weights.layout import F32
from atoll.wire import Codec, Verdict


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """An outcome that is in the anchor, and waits to be taken into local weights."""

    how: How
    verdict: Verdict
    reason: str
    """Why the run refused the update, if it did."""

    through: int
    position: Position


@dataclass(kw_only=True)
class Sealed:
    """An update in flight, with all that undoing or finishing it needs."""

    round: int
    base: F32
    """Local weights at the seal; once the outcome says carry, the old anchor as
    loaded."""

    inner_steps: int
    tokens: int
    weight: int
    frame: Frame | None = None
    """Set by the sender: these bytes are kept until an outcome lists them."""

    residual_after: F32 | None = None
    arrival: Future[Arrival] = field(default_factory=Future)


@dataclass(kw_only=True)
class Slot:
    """One fragment of an island."""

    index: int
    layout: FragmentLayout
    state: FragmentState
    up: Codec
    residual: F32 | None
    """What the codec has left over; None without error feedback."""

    sealed: Sealed | None = None
    sealed_steps: int = 0
    """The island's inner steps at the last seal."""

    settled_tokens: int = 0
    """The island's tokens that are settled: counted, refused or dropped."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `state` while an outcome is applied in the background."""
