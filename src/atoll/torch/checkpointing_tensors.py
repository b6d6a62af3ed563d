"""Tensors as a checkpoint's arrays, and arrays as tensors."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from atoll.checkpoint.arrays import Bytes, HostArray
from atoll.checkpoint.faces import Keep
from atoll.errors import UsageError

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_OF_KIND = {kind: dtype for dtype, kind in DTYPES.items()}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class TorchArray:
    """A dense tensor on any device. Implements `Array`."""

    def __init__(
        self, tensor: torch.Tensor, offset: tuple[int, ...] | None = None
    ) -> None:
        self.kind = DTYPES[tensor.dtype]
        self.shape = tuple(tensor.shape)
        self.offset = offset
        self._tensor = tensor.detach()

    @property
    def identity(self) -> Hashable:
        # Two weights that are tied are one memory, and are written once.
        tensor = self._tensor
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        return (place, self.shape, tensor.stride(), tensor.dtype, self.offset)

    def flat(self) -> Bytes:
        whole = self._tensor.to("cpu").resolve_conj().resolve_neg().contiguous()
        flat: Bytes = whole.reshape(-1).view(torch.uint8).numpy()
        return flat

    def copy_to(self, into: Bytes) -> None:
        _seen_as(into, self._tensor.dtype, self.shape).copy_(self._tensor)


def encode_tensor(tensor: torch.Tensor, keep: Keep) -> str:
    """Have a tensor written, and return the name of its array."""
    check(tensor)
    return keep(TorchArray(tensor))


def tensor_of(array: HostArray) -> torch.Tensor:
    """Return an array that was read as a tensor, in the same memory."""
    return _seen_as(array.flat(), _OF_KIND[array.kind], array.shape)


def _seen_as(data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)  # torch views no empty memory
    return torch.from_numpy(data).view(dtype).view(shape)


def dtype_of(kind: str) -> torch.dtype | None:
    """Return the dtype of a kind; None if there is none."""
    return _OF_KIND.get(kind)


def check(tensor: torch.Tensor) -> None:
    """Raise UsageError, without a path, unless a tensor's numbers can be written."""
    if tensor.is_meta:
        raise UsageError(
            "a tensor on the meta device has no numbers to save. Load its weights first"
        )
    if tensor.layout != torch.strided or type(tensor) not in _PLAIN:
        raise UsageError(
            f"a tensor of the type {type(tensor).__name__} and layout {tensor.layout} "
            "cannot be saved. Save what it is made of, as dense tensors"
        )
    if tensor.dtype not in DTYPES:
        raise UsageError(
            f"a tensor of {tensor.dtype} cannot be saved. Known are "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )
