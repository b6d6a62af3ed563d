"""The anchor as users take it away: one safetensors file, sent from the disk.

The file has every tensor that the run carries, cast to the tensor's own dtype, and the
constants that it keeps, which are sent from where they lie. Its metadata say of which
round each fragment is, and what the model is, in its own order.

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
from atoll.coordinator.office import Office
from atoll.coordinator.spool import nameless, write_all
from atoll.coordinator.states import StateFile, at_once
from atoll.errors import CorruptError, Refused
from atoll.http import FilePart, FileParts
from atoll.journal import Past
from atoll.journal.constants import name_of
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.constants import DTYPES, has
from atoll.protocol.run_state import CoordinatorState
from atoll.weights import FragmentLayout, lay_out
from atoll.weights.layout import F32, blocks
from atoll.wire import blake3_digest

CONTENT_TYPE = "application/vnd.safetensors"

ALIGNED_BYTES = 8
LONGEST_ROUND = 2**64 - 1


Taken = tuple[int, bytes]
"""The round of a fragment whose anchor was written, and the digest of its state."""

Put = Callable[[F32, int], None]
"""Writes a stretch of a fragment's anchor, given its first element's place there."""

Fill = Callable[[int, Put], Taken]
"""Puts the anchor of a fragment, in stretches."""


@dataclass(frozen=True)
class AnchorFile:
    """An anchor in a file without a name, and all that is sent with it."""

    file: StateFile
    body: FileParts

    @property
    def digest(self) -> str:
        return self.file.digest


class AnchorFiles:
    """Has a file of the newest anchor that somebody asked for, and of an older one."""

    def __init__(self, office: Office, directory: Path, root: Path) -> None:
        self._office, self._directory, self._root = office, directory, root
        self._lock = threading.Lock()
        self._file: AnchorFile | None = None
        self._past_file: AnchorFile | None = None

    def newest(self) -> AnchorFile:
        """Return the present anchor, written if nobody has asked before.

        Raises:
            Refused: the run has no weights yet.
            Unreachable: a round is being committed: ask again.
        """
        with at_once(self._lock, "copy of the anchor"):
            return self._newest(self._state())

    def at(self, round: int) -> AnchorFile:
        """Return the anchor of a round: the present one, or one from the journal.

        Raises:
            Refused: the run has no weights yet, or the round is not kept.
            CorruptError: what the journal keeps of it is damaged.
        """
        with at_once(self._lock, "copy of the anchor"):
            state = self._state()
            past = self._office.change_by(lambda service, _: service.journal.past)
            _require_kept(past, round)
            digests = [past.digest(index, round) for index in range(len(state.rounds))]
            digest = _joined([(round, each) for each in digests])
            if digest == _digest(state):
                file = self._newest(state)
                if file.digest == digest:  # the run may have gone on meanwhile
                    return file
            return self._past(state, past, round, digest)

    def _state(self) -> CoordinatorState:
        state, _ = self._office.look()
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
        self, state: CoordinatorState, past: Past, round: int, digest: str
    ) -> AnchorFile:
        def fill(index: int, put: Put) -> Taken:
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

    def _present(self, index: int, put: Put) -> Taken:
        with self._office.reading(index) as held:
            put(held.anchor, 0)
            return held.round, held.digest

    def _write(self, state: CoordinatorState, fill: Fill) -> AnchorFile:
        assert state.model is not None
        layout = lay_out(state.model, state.settings)
        kept = self._office.change_by(lambda service, _: service.catalogue.kept)
        plan = FilePlan.of(state.run, state.model, fragments=len(layout), kept=kept)
        constants = self._office.change_by(lambda service, _: service.journal.constants)
        for constant in plan.constants:
            constants.require_sound(constant)
        room = self._office.change_by(lambda service, _: service.journal.room)
        room.require(plan.size_bytes, what="a copy of the anchor to send")
        handle = nameless(self._directory)
        try:
            taken = [
                fill(index, partial(plan.write, handle, fragment))
                for index, fragment in enumerate(layout)
            ]
            os.lseek(handle, 0, os.SEEK_SET)
            rounds = [round for round, _ in taken]
            write_all(handle, memoryview(plan.head(rounds)))
        except BaseException:
            os.close(handle)
            raise
        file = StateFile(
            round=min(rounds),
            digest=_joined(taken),
            handle=handle,
            size_bytes=plan.size_bytes,
        )
        return AnchorFile(file, self._parts(plan, handle))

    def _parts(self, plan: FilePlan, handle: int) -> FileParts:
        """Return what is sent: the file, with constants where it has holes."""
        parts, at = [], 0
        for constant in plan.constants:
            first, last = (
                plan.head_bytes + each for each in plan.places[constant.name]
            )
            parts.append(FilePart(file=handle, first=at, length=first - at))
            file = self._root / name_of(constant.digest)
            parts.append(FilePart(file=file, length=last - first))
            at = last
        parts.append(FilePart(file=handle, first=at, length=plan.size_bytes - at))
        return FileParts(tuple(part for part in parts if part.length))


@dataclass(frozen=True)
class FilePlan:
    """Where everything lies in the file, known before the rounds are."""

    run: str
    model: ModelSpec
    places: Mapping[str, tuple[int, int]]
    """The first byte of a tensor and the one after its last, from the data on."""

    head_bytes: int

    @classmethod
    def of(
        cls, run: str, model: ModelSpec, *, fragments: int, kept: Collection[str]
    ) -> FilePlan:
        places = _places(model, kept)
        draft = cls(run, model, places, 0).head([LONGEST_ROUND] * fragments)
        return cls(run, model, places, len(draft))

    @property
    def size_bytes(self) -> int:
        return self.head_bytes + max((last for _, last in self.places.values()))

    @property
    def constants(self) -> list[TensorSpec]:
        """Those that are in the file, in its order."""
        held = self.model.with_role("constant")
        there = [each for each in held if each.name in self.places]
        return sorted(there, key=lambda each: self.places[each.name])

    def head(self, rounds: Sequence[int]) -> bytes:
        """Return what stands before the data, filled up to `head_bytes`."""
        table: dict[str, object] = {
            "__metadata__": {
                "format": "pt",
                "atoll.run": self.run,
                "atoll.round": str(min(rounds)),
                "atoll.rounds": json.dumps(list(rounds)),
                "atoll.model": json.dumps([_row(each) for each in self.model.tensors]),
            }
        }
        for tensor in self.model.tensors:
            if tensor.name not in self.places:
                continue
            table[tensor.name] = {
                "dtype": DTYPES[tensor.dtype][0],
                "shape": list(tensor.shape),
                "data_offsets": list(self.places[tensor.name]),
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        size = max(8 + len(text), self.head_bytes)
        text = text.ljust(size + -size % ALIGNED_BYTES - 8)
        return len(text).to_bytes(8, "little") + text

    def write(
        self, handle: int, fragment: FragmentLayout, values: F32, first: int
    ) -> None:
        """Write a stretch of a fragment's vector, which begins with element `first`."""
        last = first + len(values)
        at = bisect_right(fragment.offsets, first) - 1
        for tensor, start, end in zip(
            fragment.tensors[at:],
            fragment.offsets[at:],
            fragment.offsets[at + 1 :],
            strict=False,
        ):
            if start >= last:
                return
            low, high = max(start, first), min(end, last)
            place = self.places[tensor.name][0]
            place += DTYPES[tensor.dtype][1] * (low - start)
            os.lseek(handle, self.head_bytes + place, os.SEEK_SET)
            for part in _parts(tensor.dtype, values[low - first : high - first]):
                write_all(handle, part)


def _places(model: ModelSpec, kept: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return where each tensor lies; wide elements first, so that all are aligned."""
    held = [t for t in model.tensors if t.role != "constant" or has(kept, t)]
    places, at = {}, 0
    for tensor in sorted(held, key=lambda each: -DTYPES[each.dtype][1]):
        first, at = at, at + DTYPES[tensor.dtype][1] * int(np.prod(tensor.shape))
        places[tensor.name] = (first, at)
    return places


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


def _require_kept(past: Past, round: int) -> None:
    kept = past.rounds()
    if round not in kept:
        raise Refused(
            f"The anchor of round {round} is not kept: {listed_rounds(kept)} can be "
            "had. Leave the round out to take the newest of each fragment."
        )


def listed_rounds(rounds: Sequence[int]) -> str:
    """Return rounds in words, with what stands between the ends of a stretch left out.

    >>> listed_rounds([0, 10, 11, 12])
    'rounds 0, 10 to 12'
    """
    firsts = [each for each in rounds if each - 1 not in rounds]
    lasts = [each for each in rounds if each + 1 not in rounds]
    parts = [
        str(first) if first == last else f"{first} to {last}"
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return f"rounds {', '.join(parts)}" if parts else "no round of all fragments"


def _digest(state: CoordinatorState) -> str:
    return _joined([(each.number - 1, each.base) for each in state.rounds])


def _joined(taken: Sequence[Taken]) -> str:
    """Return what names an anchor: a void round leaves the weights, and is another."""
    named = b"".join(round.to_bytes(8, "little") + digest for round, digest in taken)
    return blake3_digest(named).hex()[:32]
