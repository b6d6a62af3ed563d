"""Weights that wait for a model: what `atoll serve --init` was given.

Rule 1: a copy of the file lies with the journal. It is durable before the run is, and
        goes when the run has weights: a crash leaves the file, or a run that has them.
Rule 2: a file that does not say its model's order waits for the first island, which
        says it by joining. The run is founded before that island is answered, so it
        takes the weights like any later one.
Rule 3: weights that do not fit change nothing: the island is told why, and they wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from atoll.coordinator.office import Office
from atoll.coordinator.service import Service
from atoll.coordinator.weights_file import WeightsFile
from atoll.disk import Disk
from atoll.errors import Unreachable, UsageError
from atoll.exchange import FoundCall, Frame, JoinCall, Reply
from atoll.protocol import JoinReply, ModelSpec, Position, TensorSpec
from atoll.wire.digests import Bytes

INIT = "init/"
CALLED = "the file that `atoll serve --init` was given"
COPY_BYTES = 2**22
FEW = 5
"""Names that are told; of the others only how many there are."""

log = logging.getLogger("atoll")


def keep(disk: Disk, path: Path) -> None:
    """Have a durable copy of a file with the journal, in the place of any before it.

    Raises:
        UsageError: the file cannot be read; one that was kept before is there still.
        DiskError: likewise for the disk.
    """
    before = disk.names(INIT)
    number = max((int(name.removeprefix(INIT)) for name in before), default=0) + 1
    disk.write_new(f"{INIT}{number}", _parts(path))
    for name in before:
        disk.remove(name)


def kept(root: Path) -> Path | None:
    """Return the file that waits with a journal, if there is one."""
    return max(_all(root), key=lambda path: int(path.name), default=None)


def discard(root: Path) -> None:
    """Forget the file: the run has its weights. What stays is tried again later."""
    for path in _all(root):
        with suppress(OSError):
            path.unlink(missing_ok=True)


class FirstWeights:
    """Answers joinings; the first one founds a run for which a file waits."""

    def __init__(self, office: Office, root: Path) -> None:
        self._office, self._root = office, root
        self._path = kept(root)
        self._busy = threading.Lock()

    def join(self, call: JoinCall) -> Reply:
        """Return the answer to a joining.

        Raises:
            ModelError, UsageError: the weights that wait are not those of the island's
                model, or none to found a run on.
            Unreachable: another island's joining founds the run: ask again.
        """
        if not self.is_awaited:
            return self._office.ask(call)
        if not self._busy.acquire(blocking=False):
            raise Unreachable(
                f"The run is being founded with {CALLED}. Ask again in a moment."
            )
        try:
            return self._found(call) if self.is_awaited else self._office.ask(call)
        finally:
            self._busy.release()

    @property
    def is_awaited(self) -> bool:
        """Whether weights wait for the first island's model."""
        if self._path is None or self._office.look()[0].model is not None:
            return False
        return self._path.exists()  # an operator may have removed it, as serve says

    def _found(self, call: JoinCall) -> Reply:
        """Read the weights, and nobody waits; then join and found in one step."""
        assert self._path is not None
        state, _ = self._office.look()
        file, model = WeightsFile(self._path, called=CALLED), call.request.model
        framed = file.states(model, state.settings, run=state.run)
        states = tuple(Frame(*each) for each in framed)
        self._keep(file.constants(model, state.settings))
        reply = self._office.change_by(
            lambda service, now_s: _founded(service, call, states, now_s)
        )
        self._path = None
        discard(self._root)
        _tell_beyond(file, model)
        return reply

    def _keep(self, constants: Mapping[TensorSpec, Iterable[Bytes]]) -> None:
        """Keep what the file has of the model's constants, part by part."""
        for constant, parts in constants.items():
            there = 0
            for part in parts:
                there = self._office.change_by(
                    partial(_take, constant=constant, first=there, part=part)
                )


def _take(
    service: Service, now_s: float, *, constant: TensorSpec, first: int, part: Bytes
) -> int:
    return service.journal.constants.take(constant, first, part)


def _founded(
    service: Service, call: JoinCall, states: tuple[Frame, ...], now_s: float
) -> Reply:
    joined = service.handle(call, now_s)
    assert isinstance(joined, JoinReply)
    if not joined.is_founder:
        return joined
    who = joined.island, joined.incarnation
    position = service.handle(FoundCall(*who, states, is_given=True), now_s)
    assert isinstance(position, Position)
    return replace(joined, is_founder=False, position=position)


def _tell_beyond(file: WeightsFile, model: ModelSpec) -> None:
    names = file.beyond(model)
    if names:
        few = ", ".join(names[:FEW]) + (", ..." if len(names) > FEW else "")
        log.warning(
            "%d tensors of %s are not used, because the model does not have them: %s",
            len(names),
            CALLED,
            few,
        )


def _all(root: Path) -> list[Path]:
    return [path for path in (root / INIT).glob("*") if path.name.isdecimal()]


def _parts(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while part := file.read(COPY_BYTES):
                yield part
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}.") from exc
