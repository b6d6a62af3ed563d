"""The anchor as users take it away: one safetensors file, sent from the disk.

The file has every tensor that the run carries, cast to the tensor's own dtype, and the
constants that it keeps, which are sent from where they lie. Its metadata contain the
round of each fragment, and the model in its own order.

The present anchor is in memory. One of a round that is over comes from the journal, a
piece at a time, while its states and means still lead there.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from atoll import kernels
from atoll.coordinator.spool import nameless, write_all
from atoll.coordinator.states import StateFile, try_lock
from atoll.coordinator.threads import ThreadedService
from atoll.errors import CorruptError, Refused
from atoll.http import FilePart
from atoll.journal import (
    JournaledAnchors,
)
from atoll.journal.constants import name_of
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.model import DTYPES, has
from atoll.safetensors import ArrayEntry, SafetensorsHeader
from atoll.weights import FragmentLayout, lay_out
from atoll.weights.layout import F32, blocks
from atoll.wire import blake3_digest

CONTENT_TYPE = "application/vnd.safetensors"

LONGEST_ROUND = 2**64 - 1


WrittenAnchor = tuple[int, bytes]
"""The round of a fragment whose anchor was written, and the digest of its state."""

Put = Callable[[F32, int], None]
"""Writes a range of a fragment's anchor, given the index of its first element."""

Fill = Callable[[int, Put], WrittenAnchor]
"""Writes the anchor of a fragment, range by range."""


@dataclass(frozen=True)
class AnchorFile:
    """An anchor in an anonymous file, and the parts to send."""

    file: StateFile
    body: tuple[FilePart, ...]

    @property
    def digest(self) -> str:
        return self.file.digest


class AnchorFiles:
    """Caches a file of the newest requested anchor, and one of an older anchor."""

    def __init__(
        self, threaded_service: ThreadedService, directory: Path, root: Path
    ) -> None:
        self._threaded_service, self._directory, self._root = (
            threaded_service,
            directory,
            root,
        )
        self._lock = threading.Lock()
        self._file: AnchorFile | None = None
        self._past_file: AnchorFile | None = None

    def newest(self) -> AnchorFile:
        """Return the file of the present anchor; write it on first request.

        Raises:
            Refused: the run has no weights yet.
            Unreachable: a round is being committed: ask again.
        """
        with try_lock(self._lock, "copy of the anchor"):
            return self._newest(self._state())

    def at(self, round: int) -> AnchorFile:
        """Return the anchor of a round: the present one, or one from the journal.

        Raises:
            Refused: the run has no weights yet, or the round is not kept.
            CorruptError: its data in the journal is damaged.
        """
        with try_lock(self._lock, "copy of the anchor"):
            state = self._state()
            past = self._threaded_service.change_by(
                lambda service, _: service.journal.past
            )
            _require_kept(past, round)
            digests = [past.digest(index, round) for index in range(len(state.rounds))]
            digest = _joined([(round, state_digest) for state_digest in digests])
            if digest == _digest(state):
                file = self._newest(state)
                if file.digest == digest:  # a round may have been committed meanwhile
                    return file
            return self._past(state, past, round, digest)

    def _state(self) -> CoordinatorState:
        state, _ = self._threaded_service.look()
        if state.model is None:
            raise Refused(
                "The run has no weights yet: its first island brings them. Ask again "
                "when one has joined."
            )
        return state

    def _newest(self, state: CoordinatorState) -> AnchorFile:
        if self._file is None or self._file.digest != _digest(state):
            self._file = None  # its space on the disk is free before more is taken
            self._file = self._write(state, self._present)
        return self._file

    def _past(
        self, state: CoordinatorState, past: JournaledAnchors, round: int, digest: str
    ) -> AnchorFile:
        def fill(index: int, put: Put) -> WrittenAnchor:
            first = 0
            for piece in past.anchor(index, round):
                put(piece, first)
                first += len(piece)
            return round, past.digest(index, round)

        if self._past_file is None or self._past_file.digest != digest:
            self._past_file = None
            try:
                self._past_file = self._write(state, fill)
            except CorruptError:
                _require_kept(past, round)  # compaction may have collected it
                raise
        return self._past_file

    def _present(self, index: int, put: Put) -> WrittenAnchor:
        with self._threaded_service.reading(index) as fragment:
            put(fragment.anchor, 0)
            return fragment.round, fragment.digest

    def _write(self, state: CoordinatorState, fill: Fill) -> AnchorFile:
        assert state.model is not None
        layout = lay_out(state.model, state.settings)
        journal, kept_constants = self._threaded_service.change_by(
            lambda service, _: (service.journal, service.catalogue.kept)
        )
        plan = FilePlan.of(
            state.run, state.model, fragments=len(layout), kept_constants=kept_constants
        )
        for constant in plan.constants:
            journal.constants.require_sound(constant)
        journal.room.require(plan.size_bytes, purpose="a copy of the anchor to send")
        handle = nameless(self._directory)
        try:
            written = [
                fill(index, partial(plan.write, handle, fragment))
                for index, fragment in enumerate(layout)
            ]
            os.lseek(handle, 0, os.SEEK_SET)
            rounds = [round for round, _ in written]
            write_all(handle, memoryview(plan.head(rounds)))
        except BaseException:
            os.close(handle)
            raise
        file = StateFile(
            round=min(rounds),
            digest=_joined(written),
            handle=handle,
            size_bytes=plan.size_bytes,
        )
        return AnchorFile(file, self._parts(plan, handle))

    def _parts(self, plan: FilePlan, handle: int) -> tuple[FilePart, ...]:
        """Return the parts to send: the file, with constants in its holes."""
        parts, position = [], 0
        for constant in plan.constants:
            first, last = (
                plan.head_bytes + offset for offset in plan.offsets[constant.name]
            )
            parts.append(FilePart(file=handle, first=position, length=first - position))
            file = self._root / name_of(constant.digest)
            parts.append(FilePart(file=file, length=last - first))
            position = last
        parts.append(
            FilePart(file=handle, first=position, length=plan.size_bytes - position)
        )
        return tuple(part for part in parts if part.length)


@dataclass(frozen=True)
class FilePlan:
    """The layout of the file, which does not depend on the rounds."""

    run: str
    model: ModelSpec
    offsets: Mapping[str, tuple[int, int]]
    """The first byte of a tensor and the one after its last, from the data on."""

    head_bytes: int

    @classmethod
    def of(
        cls,
        run: str,
        model: ModelSpec,
        *,
        fragments: int,
        kept_constants: Collection[str],
    ) -> FilePlan:
        offsets = _offsets(model, kept_constants)
        draft = cls(run, model, offsets, 0).head([LONGEST_ROUND] * fragments)
        return cls(run, model, offsets, len(draft))

    @property
    def size_bytes(self) -> int:
        return self.head_bytes + max((last for _, last in self.offsets.values()))

    @property
    def constants(self) -> list[TensorSpec]:
        """Those that are in the file, in its order."""
        constants = self.model.with_role("constant")
        included = [constant for constant in constants if constant.name in self.offsets]
        return sorted(included, key=lambda constant: self.offsets[constant.name])

    def head(self, rounds: Sequence[int]) -> bytes:
        """Return the safetensors header, padded to `head_bytes`."""
        metadata = {
            "format": "pt",
            "atoll.run": self.run,
            "atoll.round": str(min(rounds)),
            "atoll.rounds": json.dumps(list(rounds)),
            "atoll.model": json.dumps([_row(tensor) for tensor in self.model.tensors]),
        }
        arrays = {
            tensor.name: ArrayEntry(
                DTYPES[tensor.dtype][0], tensor.shape, *self.offsets[tensor.name]
            )
            for tensor in self.model.tensors
            if tensor.name in self.offsets
        }
        return SafetensorsHeader(arrays, metadata, self.head_bytes).pack()

    def write(
        self, handle: int, fragment: FragmentLayout, values: F32, first: int
    ) -> None:
        """Write a stretch of a fragment's vector, which begins with element `first`."""
        last = first + len(values)
        index = bisect_right(fragment.offsets, first) - 1
        for tensor, start, end in zip(
            fragment.tensors[index:],
            fragment.offsets[index:],
            fragment.offsets[index + 1 :],
            strict=False,
        ):
            if start >= last:
                return
            low, high = max(start, first), min(end, last)
            offset = self.offsets[tensor.name][0]
            offset += DTYPES[tensor.dtype][1] * (low - start)
            os.lseek(handle, self.head_bytes + offset, os.SEEK_SET)
            for part in _parts(tensor.dtype, values[low - first : high - first]):
                write_all(handle, part)


def _offsets(
    model: ModelSpec, kept_constants: Collection[str]
) -> dict[str, tuple[int, int]]:
    """Return where each tensor lies; wide elements first, so that all are aligned."""
    included = [
        t for t in model.tensors if t.role != "constant" or has(kept_constants, t)
    ]
    offsets, end = {}, 0
    for tensor in sorted(included, key=lambda spec: -DTYPES[spec.dtype][1]):
        first, end = end, end + DTYPES[tensor.dtype][1] * int(np.prod(tensor.shape))
        offsets[tensor.name] = (first, end)
    return offsets


def _row(tensor: TensorSpec) -> list[object]:
    """Return a tensor as a joining has it."""
    shape = list(tensor.shape)
    return [tensor.name, shape, tensor.dtype, tensor.role, tensor.digest]


def _parts(dtype: str, values: F32) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, cast, a block at a time."""
    rounded = np.empty_like(values[: next(blocks(len(values)), slice(0)).stop])
    for block in blocks(len(values)):
        part: np.ndarray = values[block]
        if dtype == "bfloat16":
            out = rounded[: len(part)]
            kernels.active().round_bf16(part, out)
            part = (out.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        elif dtype == "float16":
            with np.errstate(over="ignore"):  # as it loads: beyond fp16 is infinity
                part = part.astype(np.float16)
        yield memoryview(part.tobytes())


def _require_kept(past: JournaledAnchors, round: int) -> None:
    available = past.rounds()
    if round not in available:
        raise Refused(
            f"The anchor of round {round} is not kept. Available: "
            f"{listed_rounds(available)}. Leave the round out to take the newest of "
            "each fragment."
        )


def listed_rounds(rounds: Sequence[int]) -> str:
    """Return rounds as text, with each range given by its two ends.

    >>> listed_rounds([0, 10, 11, 12])
    'rounds 0, 10 to 12'
    """
    firsts = [number for number in rounds if number - 1 not in rounds]
    lasts = [number for number in rounds if number + 1 not in rounds]
    parts = [
        str(first) if first == last else f"{first} to {last}"
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return f"rounds {', '.join(parts)}" if parts else "no round of all fragments"


def _digest(state: CoordinatorState) -> str:
    return _joined([(round.number - 1, round.base) for round in state.rounds])


def _joined(written: Sequence[WrittenAnchor]) -> str:
    """Return what names an anchor: a void round leaves the weights, and is another."""
    named = b"".join(round.to_bytes(8, "little") + digest for round, digest in written)
    return blake3_digest(named).hex()[:32]
