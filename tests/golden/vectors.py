"""The golden frames: what each holds, written so that every bit is known.

Values are powers of two times small integers, or bits written out, so that they are
exact in fp32 and no machine can build them differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from atoll.wire.codecs import codec
from atoll.wire.digests import PIECE_ELEMENTS, state_digest
from atoll.wire.frame import update_digest, with_body
from atoll.wire.header import FrameKind, Header, OuterValues, TrainingProgress
from atoll.wire.roster import Roster, RosterEntry, Verdict

Floats = NDArray[np.float32]
Body = NDArray[np.uint8]

# Zeros, subnormals, the smallest normal, both sides of 2**-100, and values halfway
# between two bf16 numbers: 0x3f808000 rounds down to even, 0x3f818000 up.
SPECIAL_BITS = bytes.fromhex(
    "00000000 80000000 00000001 80000001 007fffff 80400000"
    "00800000 80800000 0d800000 8d800000 0d7fffff 0d000000"
    "3f800000 bf800000 3f808000 3f818000 bf808001 3f807fff"
)
# The largest numbers of bf16, and the largest that rounds down to one.
LARGE_BITS = bytes.fromhex("7f7f0000 ff7f0000 7f7f7fff")
SEED = 0x0123456789ABCDEF


def values(elements: int, *, has_huge: bool = True) -> Floats:
    """Return a vector with a plain part, a tiny part and a huge part.

    Elements 0 to 255 are plain, with the special bits first; 256 to 511 are tiny, so
    that whole blocks of int8 and e3m0 are zero; huge ones stand from 520 on, unless a
    codec that sums magnitudes could not hold them.
    """
    numbers = [
        ((i * 7919) % 2003 - 1001) * 2.0 ** -(i % 23 + 3) for i in range(elements)
    ]
    vector = np.array(numbers, dtype=np.float32)
    vector[256:512] *= np.float32(2.0**-120)
    bits = vector.view(np.uint32)
    bits[:18] = np.frombuffer(SPECIAL_BITS, dtype=">u4")
    if has_huge and elements > 523:
        bits[520:523] = np.frombuffer(LARGE_BITS, dtype=">u4")
    return vector


def norm_of(decoded: Floats) -> float:
    """Return the norm by the rule of docs/wire-format.md: 64 sums, then their sum."""
    sums = [0.0] * 64
    for index, value in enumerate(decoded.tolist()):
        sums[index % 64] += value * value
    return math.sqrt(reduce(add, sums))


def encoded(name: str, vector: Floats) -> tuple[Body, Floats]:
    """Return a vector's body and what it decodes to."""
    packing = codec(name)
    body = np.zeros(packing.body_bytes(len(vector)), dtype=np.uint8)
    packing.encode(vector, body, seed=SEED if name == "bf16-stochastic" else 0)
    decoded = np.empty_like(vector)
    packing.decode(body, decoded)
    return body, decoded


def an_update(name: str, elements: int) -> tuple[Header, Body]:
    """Return an update of `values(elements)` in the codec `name`."""
    body, decoded = encoded(name, values(elements, has_huge=name != "topk-2bit"))
    header = Header(
        kind=FrameKind.UPDATE,
        run="lagoon",
        fragment=2,
        round=7,
        island="tokyo-1",
        incarnation=3,
        epoch=1,
        base=bytes(range(16)),
        codec=name,
        seed=SEED if name == "bf16-stochastic" else 0,
        elements=elements,
        weight=9,
        norm=norm_of(decoded),
        progress=TrainingProgress(inner_steps=700, tokens=358400, cursor=b"row 12"),
    )
    return with_body(header, body), body


def departing() -> tuple[Header, Body]:
    """Return a departing update with names beyond ASCII and the largest counters."""
    header, body = an_update("bf16", 77)
    header = replace(
        header,
        kind=FrameKind.DEPARTING,
        run="лагуна",
        island="Reykjavík 東京",
        incarnation=2**64 - 1,
        weight=2**64 - 1,
        progress=TrainingProgress(
            inner_steps=2**64 - 1, tokens=2**64 - 1, cursor=bytes(4096)
        ),
    )
    return header, body


def refused() -> tuple[Header, Body]:
    """Return an update that its own island refuses."""
    header = Header(
        kind=FrameKind.UPDATE,
        run="lagoon",
        fragment=0,
        round=1,
        island="tokyo-1",
        weight=0,
        refused="element 17 of layers.0.weight is NaN",
    )
    return header, np.empty(0, dtype=np.uint8)


def entry(island: str, verdict: Verdict, reason: str = "") -> RosterEntry:
    """Return what a roster says of an island; one that is late had staged nothing."""
    is_late = verdict is Verdict.LATE
    sent = replace(an_update("bf16", 589)[0], island=island)
    return RosterEntry(
        island=island,
        incarnation=3,
        digest=b"" if is_late else update_digest(sent),
        weight=0 if is_late else sent.weight,
        verdict=verdict,
        reason=reason,
        inner_steps=0 if is_late else sent.progress.inner_steps,
        tokens=0 if is_late else sent.progress.tokens,
    )


def agreed() -> tuple[Header, Body]:
    """Return an outcome in which one island counted, one is late, one is refused."""
    body, decoded = encoded("bf16", values(589))
    header = Header(
        kind=FrameKind.AGREED,
        run="lagoon",
        fragment=2,
        round=7,
        epoch=1,
        base=bytes(range(16)),
        codec="bf16",
        elements=589,
        weight=9,
        norm=norm_of(decoded),
        outer=OuterValues(
            optimizer="nesterov",
            lr=float(np.float32(0.7)),
            momentum=float(np.float32(0.9)),
        ),
        roster=Roster(
            (
                entry("Akureyri", Verdict.LATE),
                entry("tokyo-1", Verdict.COUNTED),
                entry("ålesund", Verdict.REFUSED, "norm: 91 is beyond 10"),
            )
        ),
    )
    return with_body(header, body), body


def void() -> tuple[Header, Body]:
    """Return the outcome of a round in which nobody counted."""
    header = Header(
        kind=FrameKind.AGREED,
        run="lagoon",
        fragment=2,
        round=8,
        base=bytes(range(16)),
        codec="int8",
        weight=0,
        outer=OuterValues(optimizer="sgd", lr=1.0, momentum=0.0),
        roster=Roster((entry("tokyo-1", Verdict.REFUSED, "base: another state"),)),
    )
    return header, np.empty(0, dtype=np.uint8)


def tails() -> tuple[Header, Body]:
    """Return an asynchronous outcome whose roster entries have each kind of tail."""
    header, body = agreed()
    assert header.outer is not None
    outer = replace(header.outer, share=0.375, buffer=8)
    roster = Roster(
        (
            replace(entry("Akureyri", Verdict.COUNTED), age=14),
            replace(entry("oslo", Verdict.LATE), window=17),
            replace(
                entry("tokyo-1", Verdict.COUNTED), age=1, window=2**32 - 1, spans=b"\1"
            ),
            replace(entry("ålesund", Verdict.COUNTED), spans=bytes(4096)),
        )
    )
    return with_body(replace(header, outer=outer, roster=roster), body), body


def gathered() -> tuple[Header, Body]:
    """Return an outcome with the bodies of three updates of unequal weights."""
    header, _ = agreed()
    vectors = [values(589), -values(589), values(589)[::-1].copy()]
    bodies = [encoded("e3m0", vector)[0] for vector in vectors]
    roster = Roster(
        (
            entry("Akureyri", Verdict.COUNTED),
            entry("oslo", Verdict.LATE),
            replace(entry("tokyo-1", Verdict.COUNTED), weight=2),
            replace(entry("ålesund", Verdict.COUNTED), weight=2**64 - 1),
        )
    )
    header = replace(
        header,
        codec="e3m0",
        roster=roster,
        gathered="mean",
        body_bytes=0,
        pieces=(),
    )
    return with_body(header, *bodies), np.concatenate(bodies)


def state() -> tuple[Header, Body]:
    """Return a state with Adam's two moments, 77 elements each."""
    anchor, first = values(77), values(77)[::-1].copy()
    second = first * first
    body = np.concatenate([anchor, first, second]).view(np.uint8)
    header = Header(
        kind=FrameKind.STATE,
        run="lagoon",
        fragment=2,
        round=7,
        base=state_digest(anchor, [first, second], 6),
        elements=3 * 77,
        weight=0,
        outer=OuterValues(
            optimizer="adam", lr=0.125, momentum=float(np.float32(0.9)), count=6
        ),
    )
    return with_body(header, body), body


# 589 = 2 * 256 + 77 and 4685 = 4096 + 589: no multiple of any block, nor even.
VECTORS: dict[str, Callable[[], tuple[Header, Body]]] = {
    "update-fp32": lambda: an_update("fp32", 589),
    "update-bf16": lambda: an_update("bf16", 589),
    "update-bf16-stochastic": lambda: an_update("bf16-stochastic", 589),
    "update-int8": lambda: an_update("int8", 589),
    "update-e3m0": lambda: an_update("e3m0", 589),
    "update-topk-2bit": lambda: an_update("topk-2bit", 4685),
    "update-two-pieces": lambda: an_update("topk-2bit", PIECE_ELEMENTS + 5),
    "update-refused": refused,
    "departing-unicode": departing,
    "agreed-three-verdicts": agreed,
    "agreed-void": void,
    "agreed-tails": tails,
    "agreed-gather": gathered,
    "state-adam": state,
}
