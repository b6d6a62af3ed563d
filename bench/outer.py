"""How long does the outer step take, with the digest of what it leaves behind?

The peer is `torch.optim.SGD(nesterov=True, fused=True)`, which hashes nothing, on as
many threads as ours. Its gradient is fp32; our mean is fp32, or the bf16 body that the
run agreed on and that the step decodes on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from _timing import Row, arguments, medians, report

from atoll.weights import FragmentState
from atoll.wire import (
    FrameKind,
    Header,
    OuterValues,
    Roster,
    RosterEntry,
    Verdict,
    codec,
    with_body,
)

LR, MOMENTUM = float(np.float32(0.7)), float(np.float32(0.9))
LIMIT = 1.7


def main() -> None:
    """Print the table."""
    given = arguments(__doc__ or "", smoke_elements=200_000)
    peer = fused_sgd(given.elements)
    state = FragmentState.found(gaussian(given.elements), "nesterov")
    mean = gaussian(given.elements)
    ours = {
        f"FragmentState.apply, {down} body": applied(state, mean, down)
        for down in ("fp32", "bf16")
    }

    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        actions = {name: on_threads(step, threads) for name, step in ours.items()}
        took = medians({"peer": peer.step} | actions, turns=given.turns)
        rows += [
            Row(
                what=f"{name}, {threads} thread{'s' * (threads > 1)}",
                ours_s=took[name],
                peer_s=took["peer"],
                ratio=took[name] / took["peer"],
                limit=LIMIT,
                at_most=True,
            )
            for name in actions
        ]
    report(f"outer step and digest beside fused SGD, {given.elements} elements", rows)


def gaussian(elements: int) -> np.ndarray:
    """Return a vector like weights."""
    return np.random.default_rng(0).standard_normal(elements, np.float32)


def fused_sgd(elements: int) -> torch.optim.SGD:
    """Return the peer, on memory as torch allocates it."""
    parameter = torch.nn.Parameter(torch.randn(elements))
    parameter.grad = torch.randn(elements)
    return torch.optim.SGD(
        [parameter], lr=LR, momentum=MOMENTUM, nesterov=True, fused=True
    )


def on_threads(step: Callable[[int], object], threads: int) -> Callable[[], object]:
    """Return a step bound to its number of threads."""
    return lambda: step(threads)


def applied(
    state: FragmentState, mean: np.ndarray, down: str
) -> Callable[[int], object]:
    """Return what an island does with an outcome."""
    body = np.empty(codec(down).body_bytes(mean.size), np.uint8)
    codec(down).encode(mean, body)
    counted = RosterEntry(
        island="a", incarnation=1, digest=bytes(32), weight=1, verdict=Verdict.COUNTED
    )
    header = Header(
        kind=FrameKind.AGREED,
        run="bench",
        fragment=0,
        round=1,
        base=state.digest,
        codec=down,
        elements=state.anchor.size,
        weight=0,
        outer=OuterValues(optimizer="nesterov", lr=LR, momentum=MOMENTUM),
        roster=Roster((counted,)),
    )
    header = with_body(header, body)

    def step(threads: int) -> None:
        following = replace(header, round=state.round + 1, base=state.digest)
        state.apply(following, body, threads=threads)

    return step


if __name__ == "__main__":
    main()
