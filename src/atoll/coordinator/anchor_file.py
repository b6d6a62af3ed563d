"""The anchor as users take it away: one safetensors file, sent from the disk.

The file has every tensor that the run carries, cast to the tensor's own dtype. What
the run only compares, constants, is not in it: their values never came here. Its
metadata say of which round each fragment is, and what the model is, in its own order.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from atoll import kernels
from atoll.coordinator.office import Office
from atoll.coordinator.service import Service
from atoll.coordinator.spool import nameless, write_all
from atoll.coordinator.states import StateFile
from atoll.errors import Refused
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.run_state import CoordinatorState
from atoll.weights import lay_out
from atoll.weights.layout import F32, blocks
from atoll.wire import blake3_digest

CONTENT_TYPE = "application/vnd.safetensors"

DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
"""What safetensors calls a dtype, and the bytes of an element."""

ALIGNED_BYTES = 8
LONGEST_ROUND = 2**64 - 1


@dataclass(frozen=True)
class Taken:
    """A copy of one fragment's anchor."""

    round: int
    digest: bytes
    anchor: F32


class AnchorFiles:
    """Has one file, of the newest anchor that somebody asked for."""

    def __init__(self, office: Office, directory: Path) -> None:
        self._office, self._directory = office, directory
        self._lock = threading.Lock()
        self._file: StateFile | None = None

    def newest(self, *, round: int | None = None) -> StateFile:
        """Return the present anchor, written if nobody has asked before.

        Args:
            round: The round that every fragment must be at; None takes any.

        Raises:
            Refused: the run has no weights yet, or is at another round.
            Unreachable: a round is being committed: ask again.
        """
        with self._lock:
            state, _ = self._office.look()
            _require_round(state, round)
            if self._file is None or self._file.digest != _digest(state):
                self._file = None  # its space on the disk is free before more is taken
                self._file = self._write(state)
                _require_round(self._office.look()[0], round)
            return self._file

    def _write(self, state: CoordinatorState) -> StateFile:
        assert state.model is not None
        layout = lay_out(state.model, state.settings)
        plan = _Plan.of(state.run, state.model, fragments=len(layout))
        handle = nameless(self._directory)
        rounds, digests = [], []
        try:
            for index, fragment in enumerate(layout):
                taken = self._office.change_by(partial(_take, index))
                for at, tensor in enumerate(fragment.tensors):
                    first, last = fragment.offsets[at : at + 2]
                    plan.write(handle, tensor, taken.anchor[first:last])
                rounds.append(taken.round)
                digests.append(taken.digest)
            os.lseek(handle, 0, os.SEEK_SET)
            write_all(handle, memoryview(plan.head(rounds)))
        except BaseException:
            os.close(handle)
            raise
        return StateFile(
            round=min(rounds),
            digest=_joined(digests),
            handle=handle,
            size_bytes=plan.size_bytes,
        )


@dataclass(frozen=True)
class _Plan:
    """Where everything lies in the file, known before the rounds are."""

    run: str
    model: ModelSpec
    places: Mapping[str, tuple[int, int]]
    """The first byte of a tensor and the one after its last, from the data on."""

    head_bytes: int

    @classmethod
    def of(cls, run: str, model: ModelSpec, *, fragments: int) -> _Plan:
        places = _places(model)
        draft = cls(run, model, places, 0).head([LONGEST_ROUND] * fragments)
        return cls(run, model, places, len(draft))

    @property
    def size_bytes(self) -> int:
        return self.head_bytes + max((last for _, last in self.places.values()))

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
        for tensor in _carried(self.model):
            table[tensor.name] = {
                "dtype": DTYPES[tensor.dtype][0],
                "shape": list(tensor.shape),
                "data_offsets": list(self.places[tensor.name]),
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        size = max(8 + len(text), self.head_bytes)
        text = text.ljust(size + -size % ALIGNED_BYTES - 8)
        return len(text).to_bytes(8, "little") + text

    def write(self, handle: int, tensor: TensorSpec, values: F32) -> None:
        os.lseek(handle, self.head_bytes + self.places[tensor.name][0], os.SEEK_SET)
        for part in _parts(tensor.dtype, values):
            write_all(handle, part)


def _carried(model: ModelSpec) -> tuple[TensorSpec, ...]:
    return tuple(each for each in model.tensors if each.role != "constant")


def _places(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return where each tensor lies; wide elements first, so that all are aligned."""
    places, at = {}, 0
    for tensor in sorted(_carried(model), key=lambda each: -DTYPES[each.dtype][1]):
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


def _require_round(state: CoordinatorState, round: int | None) -> None:
    if state.model is None:
        raise Refused(
            "The run has no weights yet: its first island brings them. Ask again "
            "when one has joined."
        )
    at = [each.number - 1 for each in state.rounds]
    if round is not None and set(at) != {round}:
        raise Refused(
            f"The anchor of round {round} is not kept: the fragments of the run are at "
            f"{at}. Leave the round out to take the newest of each."
        )


def _take(fragment: int, service: Service, now_s: float) -> Taken:
    service.settled_round(fragment)
    state = service.weights[fragment]
    return Taken(state.round, state.digest, state.anchor.copy())


def _digest(state: CoordinatorState) -> str:
    return _joined([each.base for each in state.rounds])


def _joined(digests: Sequence[bytes]) -> str:
    return blake3_digest(b"".join(digests)).hex()[:32]
