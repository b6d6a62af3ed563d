"""A safetensors file as the first weights of a run.

Rule 1: bytes are judged like bytes from a stranger: every size is bounded by the file.
Rule 2: a tensor is taken by its name, and must have the model's shape and dtype.
Rule 3: a constant is taken if the file has it, and must have the model's digest.
Rule 4: fragments depend on the model's own order, which safetensors does not keep. A
        file that `atoll export` wrote says it in its metadata; any other needs an
        island that says it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from atoll.errors import CorruptError, ModelError, UsageError
from atoll.exchange.constants import PART_BYTES
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.constants import DTYPES, to_bring
from atoll.settings import RunSettings
from atoll.weights import FragmentLayout, FragmentState, lay_out, terms_of
from atoll.weights.layout import F32, blocks, first_non_finite
from atoll.wire import MOMENTS, Header
from atoll.wire.digests import Bytes, Digesting, view_of

MAX_HEAD_BYTES = 100_000_000
"""As safetensors itself has it."""

MAX_DIMENSIONS = 64
"""As a joining has it."""

KINDS = {kind: dtype for dtype, (kind, _) in DTYPES.items()}
WIDTHS = {kind: width for kind, width in DTYPES.values()}
STORED = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}
"""What a run can carry; constants may be of others."""

_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading JSON of another form raises."""

Framed = tuple[Header, np.ndarray]


class WeightsFile:
    """The tensors of a file, read when they are asked for.

    `called` is the file in messages, in the place of its path.

    Raises:
        UsageError: it cannot be read.
        CorruptError: it is no safetensors file.
    """

    def __init__(self, path: Path, *, called: str = "") -> None:
        self.path, self._called = path, called or str(path)
        try:
            with path.open("rb") as file:
                self._read_head(file, path.stat().st_size)
        except OSError as exc:
            raise UsageError(f"{self._called} cannot be read: {exc.strerror}.") from exc
        except _MALFORMED as exc:
            raise CorruptError(
                f"{self._called} is no safetensors file: {exc}."
            ) from exc

    def _read_head(self, file: BinaryIO, size_bytes: int) -> None:
        size = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 or size > min(MAX_HEAD_BYTES, size_bytes - 8):
            raise ValueError(f"its header would have {size} bytes")
        table = json.loads(file.read(size))
        if not isinstance(table, dict):
            raise ValueError("its header is no table")
        self._first, self._size_bytes = 8 + size, size_bytes
        said = table.pop("__metadata__", None) or {}
        self._model: str | None = said.get("atoll.model")
        self._table: dict[str, Any] = table
        for name, each in table.items():
            self._place(name, each)

    def _place(self, name: str, each: dict[str, Any]) -> int:
        """Return where the bytes of a tensor begin."""
        first, last = (self._first + int(at) for at in each["data_offsets"])
        shape, kind = each["shape"], each["dtype"]
        is_shape = len(shape) <= MAX_DIMENSIONS and all(
            isinstance(size, int) and size >= 0 for size in shape
        )
        is_inside = self._first <= first <= last <= self._size_bytes
        if not is_shape or not is_inside or not isinstance(kind, str):
            raise ValueError(f"{name!r} has no place in it")
        if kind in WIDTHS:
            size = WIDTHS[kind] * math.prod(shape)
            if last - first != size:
                raise ValueError(f"{name!r} has no place in it")
        return first

    def model(self) -> ModelSpec | None:
        """Return the model in its own order; None if the file does not say.

        Raises:
            CorruptError: it does not say it as `atoll export` does.
        """
        if self._model is None:
            return None
        try:
            rows = json.loads(self._model)
            return ModelSpec(tuple(_tensor(*row) for row in rows))
        except _MALFORMED as exc:
            raise CorruptError(
                f"{self._called} does not describe its model as `atoll export` does. "
                "Export it again."
            ) from exc

    def beyond(self, model: ModelSpec) -> list[str]:
        """Return the names of tensors that the model does not have, in order."""
        return sorted(self._table.keys() - {each.name for each in model.tensors})

    def constants(
        self, model: ModelSpec, settings: RunSettings
    ) -> dict[TensorSpec, Iterable[Bytes]]:
        """Return the constants that are in the file and that the run keeps, judged.

        Raises:
            ModelError: one is another in the model.
            UsageError: they are more than the run keeps.
        """
        wanted = {each.digest for each in to_bring(model, settings)}
        found: dict[TensorSpec, Iterable[Bytes]] = {}
        for tensor in model.with_role("constant"):
            if tensor.name not in self._table:
                continue
            self._require(tensor)
            self._require_digest(tensor)
            if tensor.digest in wanted:
                wanted.discard(tensor.digest)
                found[tensor] = self._parts(tensor)
        return found

    def _require_digest(self, tensor: TensorSpec) -> None:
        digesting = Digesting()
        for part in self._parts(tensor):
            digesting.add(part)
        if (found := digesting.digest.hex()) != tensor.digest:
            raise ModelError(
                f"{tensor.name!r} is a {tensor} in the model, and one with digest "
                f"{found[:12]} in {self._called}. Give the weights of this model."
            )

    def _parts(self, tensor: TensorSpec) -> Iterator[Bytes]:
        each = self._table[tensor.name]
        left = WIDTHS[each["dtype"]] * math.prod(each["shape"])
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._place(tensor.name, each))
            while left:
                part = bytearray(min(left, PART_BYTES))
                self._fill(file, memoryview(part))
                left -= len(part)
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
        for tensor in (each for part in layout for each in part.tensors):
            self._require(tensor)
        with self.path.open("rb", buffering=0) as file:
            return [
                self._state(file, fragment, index, settings, run)
                for index, fragment in enumerate(layout)
            ]

    def _require(self, tensor: TensorSpec) -> None:
        each = self._table.get(tensor.name)
        if each is None:
            raise ModelError(
                f"{tensor.name!r} is a {tensor} in the model, and absent from "
                f"{self._called}. Give the weights of this model."
            )
        found = (tuple(each["shape"]), KINDS.get(each["dtype"], each["dtype"]))
        if found != (tensor.shape, tensor.dtype):
            shape = "x".join(map(str, found[0])) or "scalar"
            raise ModelError(
                f"{tensor.name!r} is a {tensor} in the model, and of shape {shape} and "
                f"dtype {found[1]} in {self._called}. Give the weights of this model."
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
        for at, tensor in enumerate(layout.tensors):
            self._read(
                file, tensor, anchor[layout.offsets[at] : layout.offsets[at + 1]]
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
        each = self._table[tensor.name]
        file.seek(self._place(tensor.name, each))
        for block in blocks(len(out)):
            part = np.empty(block.stop - block.start, STORED[each["dtype"]])
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
