"""The agreed weights of a run in a store, as a safetensors file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from atoll.cli.bucket.observing import Observing
from atoll.coordinator.anchor_file import FilePlan, listed_rounds
from atoll.errors import Refused
from atoll.exchange.base import verified
from atoll.exchange.bucket.large_objects import ConstantObjects
from atoll.exchange.bucket.states import PastAnchors
from atoll.weights import FragmentState

Read = Callable[[int], FragmentState]
Progress = Callable[[int, int], None]


def write_anchor(
    observing: Observing, file: Path, *, round: int | None, progress: Progress | None
) -> int:
    """Write the newest anchor into a file, or that of a round; return its bytes.

    One fragment is in memory at a time.

    Raises:
        Refused: the run has no weights yet, or the round is not kept.
        CorruptError: what is kept does not verify.
    """
    founded, layout = observing.lookout.founded, observing.lookout.sight.layout
    if founded is None:
        raise Refused(
            "The run has no weights yet: its first island brings them. Ask again when "
            "one has joined."
        )
    read = _reader(observing, round)
    kept = founded.constants
    plan = FilePlan.of(
        founded.run, founded.model, fragments=len(layout), kept_constants=kept
    )
    objects = ConstantObjects(observing.lookout.store, founded)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        rounds = []
        for index, fragment in enumerate(layout):
            state = read(index)
            plan.write(handle, fragment, state.anchor, 0)
            rounds.append(state.round)
            if progress is not None:
                progress(index + 1, len(layout))
        for constant in plan.constants:
            place = plan.head_bytes + plan.offsets[constant.name][0]
            for part in verified(constant, objects.parts(constant)):
                place += os.pwrite(handle, part, place)
        os.truncate(handle, plan.size_bytes)
        os.pwrite(handle, plan.head(rounds), 0)
    finally:
        os.close(handle)
    return plan.size_bytes


def _reader(observing: Observing, round: int | None) -> Read:
    if round is None:
        return observing.states.read
    past = PastAnchors(observing.lookout, observing.outcomes)
    kept = past.rounds()
    if round not in kept:
        raise Refused(
            f"The anchor of round {round} is not kept: {listed_rounds(kept)} can be "
            "had. Leave the round out to take the newest of each fragment."
        )
    return lambda fragment: past.state(fragment, round)
