"""The initial weights of a run, from the file of `atoll serve --init`.

Rule 1: a copy of the file lies with the journal. It is durable before the run is, and
        goes when the run has weights: a crash leaves the file, or a run that has them.
Rule 2: a file that does not say its model's order waits for the first island, which
        says it by joining. The run is founded before that island is answered, so it
        takes the weights like any later one.
Rule 3: weights that do not fit change nothing: the island gets the reason, and the file
        stays.

The file is a safetensors file.
Rule 4: bytes are judged like bytes from a stranger: every size is bounded by the file.
Rule 5: a tensor is taken by its name, and must have the model's shape and dtype.
Rule 6: a constant is taken if the file has it, and must have the model's digest.
Rule 7: fragments depend on the model's own order, which safetensors does not keep. A
        file that `atoll export` wrote says it in its metadata; any other needs an
        island that says it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from atoll.coordinator.service import Service
from atoll.coordinator.threads import ThreadedService
from atoll.disk import Disk
from atoll.errors import CorruptError, ModelError, Unreachable, UsageError
from atoll.exchange import Frame
from atoll.exchange.base import PART_BYTES
from atoll.exchange.calls import FoundCall, JoinCall, Reply
from atoll.protocol import JoinReply, ModelSpec, Position, TensorSpec
from atoll.protocol.model import DTYPES, to_bring
from atoll.safetensors import read_file_header
from atoll.settings import RunSettings
from atoll.weights import FragmentLayout, FragmentState, lay_out, terms_of
from atoll.weights.layout import F32, blocks, first_non_finite
from atoll.wire import MOMENTS, Header
from atoll.wire.digests import Blake3Hasher, Bytes, view_of

INIT = "init/"
INIT_FILE = "the file that `atoll serve --init` was given"
COPY_BYTES = 2**22
FEW = 5
"""Number of tensor names in a message; the others are only counted."""

log = logging.getLogger("atoll")


def store_init_file(disk: Disk, path: Path) -> None:
    """Store a durable copy of a file beside the journal, and remove any older copy.

    Raises:
        UsageError: the file cannot be read; an older copy stays.
        DiskError: likewise for the disk.
    """
    before = disk.names(INIT)
    number = max((int(name.removeprefix(INIT)) for name in before), default=0) + 1
    disk.write_new(f"{INIT}{number}", _parts(path))
    for name in before:
        disk.remove(name)


def find_init_file(root: Path) -> Path | None:
    """Return the file that waits with a journal, if there is one."""
    return max(_all(root), key=lambda path: int(path.name), default=None)


def discard(root: Path) -> None:
    """Remove the file: the run has its weights. A failure is retried later."""
    for path in _all(root):
        with suppress(OSError):
            path.unlink(missing_ok=True)


class InitialWeights:
    """Answers joinings; the first one founds a run for which a file waits."""

    def __init__(self, threaded_service: ThreadedService, root: Path) -> None:
        self._threaded_service, self._root = threaded_service, root
        self._path = find_init_file(root)
        self._busy = threading.Lock()

    def join(self, call: JoinCall) -> Reply:
        """Return the answer to a joining.

        Raises:
            ModelError, UsageError: the weights that wait are not those of the island's
                model, or none to found a run on.
            Unreachable: another island's joining founds the run: ask again.
        """
        if not self.is_awaited:
            return self._threaded_service.ask(call)
        if not self._busy.acquire(blocking=False):
            raise Unreachable(
                f"The run is being founded with {INIT_FILE}. Ask again in a moment."
            )
        try:
            return (
                self._found(call)
                if self.is_awaited
                else self._threaded_service.ask(call)
            )
        finally:
            self._busy.release()

    @property
    def is_awaited(self) -> bool:
        """Whether weights wait for the first island's model."""
        if self._path is None or self._threaded_service.look()[0].model is not None:
            return False
        return self._path.exists()  # an operator may have removed it, as serve says

    def _found(self, call: JoinCall) -> Reply:
        """Read the weights without the lock; then join and found in one step."""
        assert self._path is not None
        state, _ = self._threaded_service.look()
        file, model = WeightsFile(self._path, called=INIT_FILE), call.request.model
        framed = file.states(model, state.settings, run=state.run)
        states = tuple(Frame(*frame) for frame in framed)
        self._keep(file.constants(model, state.settings))
        reply = self._threaded_service.change_by(
            lambda service, now_s: _founded(service, call, states, now_s)
        )
        self._path = None
        discard(self._root)
        _tell_beyond(file, model)
        return reply

    def _keep(self, constants: Mapping[TensorSpec, Iterable[Bytes]]) -> None:
        """Store the model's constants from the file, part by part."""
        for constant, parts in constants.items():
            stored_bytes = 0
            for part in parts:
                stored_bytes = self._threaded_service.change_by(
                    partial(_take, constant=constant, first=stored_bytes, part=part)
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
    founder = joined.island, joined.incarnation
    position = service.handle(FoundCall(*founder, states, is_given=True), now_s)
    assert isinstance(position, Position)
    return replace(joined, is_founder=False, position=position)


def _tell_beyond(file: WeightsFile, model: ModelSpec) -> None:
    names = file.beyond(model)
    if names:
        few = ", ".join(names[:FEW]) + (", ..." if len(names) > FEW else "")
        log.warning(
            "%d tensors of %s are not used, because the model does not have them: %s",
            len(names),
            INIT_FILE,
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


KINDS = {kind: dtype for dtype, (kind, _) in DTYPES.items()}
STORED = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}
"""Types that a run can carry; constants may have others."""

_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that malformed JSON raises."""

Framed = tuple[Header, np.ndarray]


class WeightsFile:
    """The tensors of a file, read on demand.

    `called` is the name of the file in messages; default: its path.

    Raises:
        UsageError: it cannot be read.
        CorruptError: it is no safetensors file.
    """

    def __init__(self, path: Path, *, called: str = "") -> None:
        self.path, self._called = path, called or str(path)
        try:
            with path.open("rb") as file:
                self._header = read_file_header(file, source=self._called)
        except OSError as exc:
            raise UsageError(f"{self._called} cannot be read: {exc.strerror}.") from exc

    def model(self) -> ModelSpec | None:
        """Return the model in its own order; None if the file does not say.

        Raises:
            CorruptError: it does not say it as `atoll export` does.
        """
        text = self._header.metadata.get("atoll.model")
        if text is None:
            return None
        try:
            rows = json.loads(text)
            return ModelSpec(tuple(_tensor(*row) for row in rows))
        except _MALFORMED as exc:
            raise CorruptError(
                f"{self._called} does not describe its model as `atoll export` does. "
                "Export it again."
            ) from exc

    def beyond(self, model: ModelSpec) -> list[str]:
        """Return the names of tensors that the model does not have, in order."""
        names = {tensor.name for tensor in model.tensors}
        return sorted(self._header.arrays.keys() - names)

    def constants(
        self, model: ModelSpec, settings: RunSettings
    ) -> dict[TensorSpec, Iterable[Bytes]]:
        """Return the constants that are in the file and that the run keeps, judged.

        Raises:
            ModelError: one is another in the model.
            UsageError: they are more than the run keeps.
        """
        wanted = {constant.digest for constant in to_bring(model, settings)}
        contents: dict[TensorSpec, Iterable[Bytes]] = {}
        for tensor in model.with_role("constant"):
            if tensor.name not in self._header.arrays:
                continue
            self._require(tensor)
            self._require_digest(tensor)
            if tensor.digest in wanted:
                wanted.discard(tensor.digest)
                contents[tensor] = self._parts(tensor)
        return contents

    def _require_digest(self, tensor: TensorSpec) -> None:
        digesting = Blake3Hasher()
        for part in self._parts(tensor):
            digesting.add(part)
        if (actual := digesting.digest.hex()) != tensor.digest:
            raise ModelError(
                f"{tensor.name!r} is a {tensor} in the model, and one with digest "
                f"{actual[:12]} in {self._called}. Give the weights of this model."
            )

    def _parts(self, tensor: TensorSpec) -> Iterator[Bytes]:
        entry = self._header.arrays[tensor.name]
        remaining_bytes = entry.last - entry.first
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._header.size_bytes + entry.first)
            while remaining_bytes:
                part = bytearray(min(remaining_bytes, PART_BYTES))
                self._fill(file, memoryview(part))
                remaining_bytes -= len(part)
                yield part

    def states(
        self, model: ModelSpec, settings: RunSettings, *, run: str
    ) -> list[Framed]:
        """Return a state of round 0 for each fragment.

        Raises:
            ModelError: a tensor of the model is not in the file, or another there.
            UsageError: a value is not finite, or the model cannot be split so.
            CorruptError: the file has become shorter.
        """
        layout = lay_out(model, settings)
        for tensor in (spec for part in layout for spec in part.tensors):
            self._require(tensor)
        with self.path.open("rb", buffering=0) as file:
            return [
                self._state(file, fragment, index, settings, run)
                for index, fragment in enumerate(layout)
            ]

    def _require(self, tensor: TensorSpec) -> None:
        entry = self._header.arrays.get(tensor.name)
        if entry is None:
            raise ModelError(
                f"{tensor.name!r} is a {tensor} in the model, and absent from "
                f"{self._called}. Give the weights of this model."
            )
        actual = (entry.shape, KINDS.get(entry.kind, entry.kind))
        if actual != (tensor.shape, tensor.dtype):
            shape = "x".join(map(str, actual[0])) or "scalar"
            raise ModelError(
                f"{tensor.name!r} is a {tensor} in the model, and of shape {shape} and "
                f"dtype {actual[1]} in {self._called}. Give the weights of this model."
            )

    def _state(
        self,
        file: BinaryIO,
        layout: FragmentLayout,
        index: int,
        settings: RunSettings,
        run: str,
    ) -> Framed:
        """Read a fragment into the body of its frame: it is in memory once."""
        outer = terms_of(layout, settings).outer
        vectors = 1 + MOMENTS[outer.optimizer]
        body = np.zeros(vectors * layout.elements, np.float32)
        anchor, *moments = np.split(body, vectors)
        for position, tensor in enumerate(layout.tensors):
            self._read(
                file,
                tensor,
                anchor[layout.offsets[position] : layout.offsets[position + 1]],
            )
        if (bad := first_non_finite(anchor)) is not None:
            raise UsageError(
                f"{layout.name_at(bad)!r} holds {anchor[bad]} in {self._called}, and a "
                "run cannot be founded on that. Give other weights."
            )
        state = FragmentState(anchor, moments)
        header = state.to_header(run=run, fragment=index, outer=outer)
        return header, body.view(np.uint8)

    def _read(self, file: BinaryIO, tensor: TensorSpec, out: F32) -> None:
        entry = self._header.arrays[tensor.name]
        file.seek(self._header.size_bytes + entry.first)
        for block in blocks(len(out)):
            part = np.empty(block.stop - block.start, STORED[entry.kind])
            self._fill(file, view_of(part.view(np.uint8)))
            out[block] = _as_fp32(part)

    def _fill(self, file: BinaryIO, view: memoryview) -> None:
        while view:
            size = file.readinto(view)  # type: ignore[attr-defined] # it is unbuffered
            if not size:
                raise CorruptError(
                    f"{self._called} has become shorter while it was read. "
                    "Leave it alone, and start again."
                )
            view = view[size:]


def _as_fp32(values: np.ndarray) -> F32:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def _tensor(
    name: str, shape: list[int], dtype: str, role: Any, digest: str
) -> TensorSpec:
    if role not in ("parameter", "buffer", "constant"):
        raise ValueError(f"{role!r} is no role")
    return TensorSpec(
        name=str(name),
        shape=tuple(map(int, shape)),
        dtype=str(dtype),
        role=role,
        digest=str(digest),
    )
