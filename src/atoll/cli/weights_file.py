"""A safetensors file as the first weights of a run.

Rule 1: bytes are judged like bytes from a stranger: every size is bounded by the file.
Rule 2: fragments depend on the model's own order, which safetensors does not keep. A
file that `atoll export` wrote says it in its metadata; any other cannot found a run,
and is better loaded into the model of the first island.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from atoll.errors import CorruptError, ModelError, UsageError
from atoll.protocol import ModelSpec, TensorSpec
from atoll.settings import RunSettings
from atoll.weights import FragmentLayout, FragmentState, lay_out, terms_of
from atoll.weights.layout import F32, first_non_finite
from atoll.wire import Header

MAX_HEAD_BYTES = 100_000_000
"""As safetensors itself has it."""

KINDS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STORED = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}

Framed = tuple[Header, np.ndarray]


class WeightsFile:
    """The tensors of a file, read when they are asked for.

    Raises:
        UsageError: it cannot be read.
        CorruptError: it is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as exc:
            said = exc.strerror if isinstance(exc, OSError) else "it is empty"
            raise UsageError(f"{path} cannot be read: {said}.") from exc
        try:
            self._read_head()
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise CorruptError(f"{path} is no safetensors file: {exc}.") from exc

    def _read_head(self) -> None:
        size = int.from_bytes(self._data[:8].tobytes(), "little")
        if size > min(MAX_HEAD_BYTES, len(self._data) - 8):
            raise ValueError(f"its header would have {size} bytes")
        table = json.loads(self._data[8 : 8 + size].tobytes())
        self._first = 8 + size
        self._said: dict[str, str] = table.pop("__metadata__", {})
        self._table: dict[str, Any] = table
        for name, each in table.items():
            self._place(name, each)

    def _place(self, name: str, each: dict[str, Any]) -> slice:
        first, last = (self._first + int(at) for at in each["data_offsets"])
        size = np.dtype(STORED[each["dtype"]]).itemsize * math.prod(each["shape"])
        if not self._first <= first <= last <= len(self._data) or last - first != size:
            raise ValueError(f"{name!r} has no place in it")
        return slice(first, last)

    def model(self) -> ModelSpec:
        """Return the model in its own order, as the metadata have it.

        Raises:
            UsageError: they do not say.
            CorruptError: they are not what `atoll export` writes.
        """
        if "atoll.model" not in self._said:
            raise UsageError(
                f"{self.path} does not say in which order its model has its tensors, "
                "which safetensors does not keep: only what `atoll export` wrote can "
                "found a run. Load this one into the model before the first island "
                "joins, which then founds the run with it."
            )
        try:
            rows = json.loads(self._said["atoll.model"])
            return ModelSpec(tuple(_tensor(*row) for row in rows))
        except (ValueError, TypeError) as exc:
            raise CorruptError(
                f"{self.path} does not describe its model as `atoll export` does. "
                "Export it again."
            ) from exc

    def states(
        self, model: ModelSpec, settings: RunSettings, *, run: str
    ) -> list[Framed]:
        """Return a state of round 0 for each fragment.

        Raises:
            ModelError: a tensor of the model is not in the file, or another there.
            UsageError: a value is not finite, or the model cannot be split so.
        """
        return [
            self._state(fragment, index, settings, run)
            for index, fragment in enumerate(lay_out(model, settings))
        ]

    def _state(
        self, layout: FragmentLayout, index: int, settings: RunSettings, run: str
    ) -> Framed:
        parts = [self._values(tensor) for tensor in layout.tensors]
        anchor = np.concatenate(parts, dtype=np.float32)
        if (bad := first_non_finite(anchor)) is not None:
            raise UsageError(
                f"{layout.name_at(bad)!r} holds {anchor[bad]} in {self.path}, and a "
                "run cannot be founded on that. Give other weights."
            )
        outer = terms_of(layout, settings).outer
        state = FragmentState.found(anchor, outer.optimizer)
        return state.to_frame(run=run, fragment=index, outer=outer)

    def _values(self, tensor: TensorSpec) -> F32:
        each = self._table.get(tensor.name)
        if each is None:
            raise ModelError(
                f"{tensor.name!r} is a {tensor} in the model, and absent from "
                f"{self.path}. Give the weights of this model."
            )
        found = (tuple(each["shape"]), KINDS[each["dtype"]])
        if found != (tensor.shape, tensor.dtype):
            shape = "x".join(map(str, found[0])) or "scalar"
            raise ModelError(
                f"{tensor.name!r} is a {tensor} in the model, and of shape {shape} and "
                f"dtype {found[1]} in {self.path}. Give the weights of this model."
            )
        raw = self._data[self._place(tensor.name, each)].tobytes()
        return _as_fp32(np.frombuffer(raw, STORED[each["dtype"]]))


def _as_fp32(values: np.ndarray) -> F32:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


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
