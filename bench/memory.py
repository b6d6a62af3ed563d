"""How many bytes per parameter does an island need on the host, beyond the model?

The model lives in torch's memory and the run in none: an exchange that keeps nothing
stands in for it, and the agreed mean is one body that exists before anything is counted
(as received, it adds the bytes of the down codec while it is applied). What is left is
the island's own, as numpy's allocator reports it to tracemalloc.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from _timing import arguments

from atoll import RunSettings
from atoll.exchange import Frame, Outcome
from atoll.island import Host
from atoll.protocol import Heartbeat, JoinReply, JoinRequest, Position
from atoll.torch.model import TorchModel, TorchView
from atoll.wire import (
    FrameKind,
    Header,
    OuterValues,
    Roster,
    RosterEntry,
    Verdict,
    codec,
    update_digest,
    with_body,
)

AT_REST = {False: 8.0, True: 12.0}
"""Bytes per parameter, by error feedback: anchor, velocity, residual."""

IN_FLIGHT = 9.0
"""At most so many more for each element in flight."""

SEAL_EVERY = 2
"""Inner steps from one seal to the next; the outcome is taken in between."""

SLACK = 0.05
"""For headers, blocks and Python's own objects, at the default size."""


class Nowhere:
    """An `Exchange` that keeps nothing and counts every update, when it is let."""

    def __init__(self, settings: RunSettings, elements: int) -> None:
        self._settings = settings
        self._rounds = [1] * settings.sync.num_fragments
        self._published: dict[int, Header] = {}
        self._changed = threading.Condition()
        self._down = codec(settings.wire.down)
        self._elements = elements // settings.sync.num_fragments
        self._body = np.zeros(self._down.body_bytes(self._elements), np.uint8)
        self.answers = False

    def join(self, request: JoinRequest) -> JoinReply:
        """Let the island found the run."""
        return JoinReply(
            run="bench",
            island="a",
            incarnation=1,
            slot=0,
            settings=self._settings,
            epoch=0,
            position=self._position(),
            is_founder=True,
        )

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        """Say where the run is."""
        return self._position()

    def publish(self, frame: Frame) -> None:
        """Remember the header, and forget the body."""
        if frame.header.kind is FrameKind.UPDATE:
            with self._changed:
                self._published[frame.header.fragment] = frame.header
                self._changed.notify_all()

    def wait_published(self) -> None:
        """Return when an update is on its way."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._published), 600)

    def answer(self) -> None:
        """Let outcomes be known from now on."""
        with self._changed:
            self.answers = True
            self._changed.notify_all()

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        """Return a mean of zeros that counts the update."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.answers, wait_s):
                return None
            update = self._published.pop(fragment)
            self._rounds[fragment] = round + 1
            return Outcome(self._agreed(update), self._position())

    def state(self, fragment: int) -> Frame:
        """Nobody asks."""
        raise NotImplementedError

    def leave(self, island: str, incarnation: int) -> None:
        """Nobody minds."""

    def _agreed(self, update: Header) -> Frame:
        entry = RosterEntry(
            island="a",
            incarnation=1,
            digest=update_digest(update),
            weight=1,
            verdict=Verdict.COUNTED,
        )
        header = Header(
            kind=FrameKind.AGREED,
            run="bench",
            fragment=update.fragment,
            round=update.round,
            base=update.base,
            codec=self._down.name,
            elements=self._elements,
            weight=0,
            outer=OuterValues(optimizer="nesterov", lr=0.5, momentum=0.5),
            roster=Roster((entry,)),
        )
        return Frame(with_body(header, self._body), self._body)

    def _position(self) -> Position:
        return Position(step=0, rounds=tuple(self._rounds))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    up: str
    has_feedback: bool
    num_fragments: int = 1


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Bytes per parameter."""

    joined: float
    in_flight: float
    rested: float
    """After some rounds, nothing in flight: warm buffers are kept for the next."""

    peak: float


def main() -> None:
    """Print the table."""
    given = arguments(__doc__ or "", elements=8_000_000, smoke_elements=200_000)
    print(f"bytes per parameter of the host, {given.elements} parameters\n")
    head = f"{'up':6} {'feedback':>8} {'fragments':>9} {'joined':>8} {'limit':>8}"
    print(f"{head} {'in flight':>10} {'limit':>8} {'between':>8} {'peak':>6}")
    measure(Case(up="e3m0", has_feedback=True), 1 << 16)  # compiles what allocates
    for case in cases():
        figures = measure(case, given.elements)
        rest = AT_REST[case.has_feedback]
        most = rest + IN_FLIGHT / case.num_fragments
        print(
            f"{case.up:6} {case.has_feedback!s:>8} {case.num_fragments:9} "
            f"{figures.joined:8.2f} {mark(figures.joined, rest):>8} "
            f"{figures.in_flight:10.2f} {mark(figures.in_flight, most):>8} "
            f"{figures.rested:8.2f} {figures.peak:6.2f}"
        )


def mark(figure: float, limit: float) -> str:
    """Return the limit, with a star if it is exceeded."""
    return f"{limit:g}{'' if figure <= limit + SLACK else ' *'}"


def cases() -> Iterator[Case]:
    """Yield what is measured."""
    for up in ("fp32", "bf16", "e3m0"):
        for has_feedback in (False, True):
            yield Case(up=up, has_feedback=has_feedback)
    yield Case(up="e3m0", has_feedback=True, num_fragments=4)


def measure(case: Case, elements: int) -> Figures:
    """Live through four rounds, and look at the memory at each stage."""
    exchange = Nowhere(settings_of(case), elements)
    model = Parts(elements)
    torch_model = TorchModel.of(model)
    view = TorchView(torch_model)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()

    def per_parameter() -> float:
        return (tracemalloc.get_traced_memory()[0] - before) / elements

    request = JoinRequest(model=torch_model.spec, island="a")
    host = Host(exchange, view, request)
    joined = per_parameter()
    tracemalloc.reset_peak()
    for _ in range(SEAL_EVERY):
        host.stepped()
    exchange.wait_published()
    in_flight = per_parameter()
    exchange.answer()
    # Three rounds of every fragment, up to the step that takes the last of them.
    for _ in range(3 * SEAL_EVERY * case.num_fragments + 1 - SEAL_EVERY):
        model.wiggle()
        host.stepped()
    figures = Figures(
        joined=joined,
        in_flight=in_flight,
        rested=per_parameter(),
        peak=(tracemalloc.get_traced_memory()[1] - before) / elements,
    )
    host.leave(depart=False)
    tracemalloc.stop()
    return figures


def settings_of(case: Case) -> RunSettings:
    """Return settings that seal a fragment every other step and take it one later."""
    return RunSettings.from_dict(
        {
            "sync": {
                "sync_every": SEAL_EVERY * case.num_fragments,
                "num_fragments": case.num_fragments,
                "overlap_steps": 1,
            },
            "wire": {
                "up": case.up,
                "down": "bf16",
                "error_feedback": case.has_feedback,
            },
            "outer": {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5},
        }
    )


class Parts(torch.nn.Module):
    """Four equal blocks."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterList([torch.randn(elements // 4)]) for _ in range(4)
        )

    @torch.no_grad()
    def wiggle(self) -> None:
        """Train, as far as memory is concerned."""
        for parameter in self.parameters():
            parameter.add_(1e-3)


if __name__ == "__main__":
    main()
