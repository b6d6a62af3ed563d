"""Headers and bodies that the tests of the wire share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.wire.codecs import codec
from atoll.wire.frame import with_body
from atoll.wire.header import FrameKind, Header, OuterValues, TrainingProgress
from atoll.wire.roster import Roster, RosterEntry, Verdict

NESTEROV = OuterValues(optimizer="nesterov", lr=0.5, momentum=0.875)


def body_of(name: str, elements: int) -> NDArray[np.uint8]:
    """Return a body of the right length, all zero bytes."""
    return np.zeros(codec(name).body_bytes(elements), dtype=np.uint8)


def an_update(**changes: object) -> Header:
    """Return an update of five elements, not sealed, with `changes`."""
    values: dict[str, object] = {
        "kind": FrameKind.UPDATE,
        "run": "lagoon",
        "fragment": 2,
        "round": 7,
        "island": "tokyo-1",
        "incarnation": 3,
        "epoch": 1,
        "base": bytes(range(16)),
        "codec": "bf16",
        "elements": 5,
        "weight": 9,
        "norm": 1.25,
        "progress": TrainingProgress(inner_steps=700, tokens=5000, cursor=b"row 12"),
    }
    return Header(**(values | changes))  # type: ignore[arg-type]


def an_agreed(**changes: object) -> Header:
    """Return an agreed frame of five elements, not sealed, with `changes`."""
    values: dict[str, object] = {
        "kind": FrameKind.AGREED,
        "run": "lagoon",
        "fragment": 2,
        "round": 7,
        "codec": "bf16",
        "elements": 5,
        "outer": NESTEROV,
        "roster": Roster((an_entry(),)),
    }
    return Header(**(values | changes))  # type: ignore[arg-type]


def a_gathered(**changes: object) -> Header:
    """Return an outcome with the bodies of two updates of five elements each."""
    names = ("oslo", "tokyo-1")
    roster = Roster(tuple(an_entry(island=name) for name in names))
    return an_agreed(**({"gathered": "mean", "roster": roster} | changes))


def a_state(**changes: object) -> Header:
    """Return a state of five elements and one moment, not sealed, with `changes`."""
    values: dict[str, object] = {
        "kind": FrameKind.STATE,
        "run": "lagoon",
        "fragment": 2,
        "round": 7,
        "elements": 10,
        "outer": NESTEROV,
    }
    return Header(**(values | changes))  # type: ignore[arg-type]


def an_entry(**changes: object) -> RosterEntry:
    """Return a counted entry with `changes`."""
    values: dict[str, object] = {
        "island": "tokyo-1",
        "incarnation": 3,
        "digest": bytes(range(32)),
        "weight": 9,
        "verdict": Verdict.COUNTED,
    }
    return RosterEntry(**(values | changes))  # type: ignore[arg-type]


def sealed(header: Header) -> Header:
    """Return `header` sealed for a body of zero bytes, or for each of several."""
    body = body_of(header.codec, header.elements)
    return with_body(header, *[body] * header.num_bodies)
