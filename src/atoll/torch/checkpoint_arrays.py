"""Tensors and DTensors as arrays of a checkpoint, and arrays as tensors.

Rule 1: a rank writes the piece that it has. Of ranks with the same piece, the first one
        writes.
Rule 2: on the same mesh and with the same placements a rank reads its own piece.
Rule 3: on any other, it reads its elements from all pieces; never the whole tensor,
        unless it has the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple, TypeGuard, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from atoll.checkpoint.arrays import Bytes, HostArray
from atoll.checkpoint.frameworks import (
    Keep,
    RestoreContext,
    TreePath,
)
from atoll.checkpoint.tree import dotted
from atoll.errors import CorruptError, UsageError

Ints = tuple[int, ...]


def is_piece(value: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a rank's piece of one that several hold together."""
    return isinstance(value, DTensor)


def encode_piece(value: DTensor, keep: Keep) -> dict[str, object]:
    """Keep this rank's piece if this rank writes it, and return its description."""
    local = value.to_local()
    check(local.detach())
    if any(placement.is_partial() for placement in value.placements):
        raise UsageError(
            f"a DTensor with the placements {value.placements} is a sum that has not "
            "been made. Redistribute it before saving"
        )
    array = TorchArray(local, offset=_offset(value))
    owns = all(
        index == 0 or not placement.is_replicate()
        for index, placement in zip(_coordinate(value), value.placements, strict=True)
    )
    return {
        **_layout(value, tuple(value.shape)),
        "kind": array.kind,
        "own": {
            "array": keep(array) if owns else None,
            "offset": list(_offset(value)),
            "coordinate": list(_coordinate(value)),
        },
    }


def decode_piece(
    body: Mapping[str, object], path: TreePath, context: RestoreContext
) -> torch.Tensor:
    """Return a tensor with the layout of the live tensor at its path."""
    template = context.like(path)
    shape = _ints(body.get("shape"), path)
    if not isinstance(template, DTensor):
        return _assembled(body, path, context, (0,) * len(shape), shape)
    if _layout(template, shape) == {
        key: body.get(key) for key in _layout(template, shape)
    }:
        return _from_local(_own(body, path, context), template, shape)
    if tuple(template.shape) != shape:
        raise UsageError(
            f"{dotted(path)} has the shape {shape} in the checkpoint, and belongs to "
            f"one of {tuple(template.shape)} here: it cannot be laid out again. "
            "Restore it on the mesh that it was saved on."
        )
    _require_contiguous(template.placements, path)
    size = tuple(template.to_local().shape)
    return _from_local(
        _assembled(body, path, context, _offset(template), size), template, shape
    )


def laid_out(full: torch.Tensor, path: TreePath, template: object) -> torch.Tensor:
    """Return this rank's piece of a full tensor, if the live tensor is a piece."""
    if not isinstance(template, DTensor) or template.shape != full.shape:
        return full
    _require_contiguous(template.placements, path)
    slices = tuple(
        slice(first, first + size)
        for first, size in zip(
            _offset(template), template.to_local().shape, strict=True
        )
    )
    return _from_local(full[slices].clone(), template, tuple(full.shape))


class _Piece(NamedTuple):
    rank: int
    array: str
    offset: Ints


def _own(
    body: Mapping[str, object], path: TreePath, context: RestoreContext
) -> torch.Tensor:
    """Return the piece of this rank, which another may have written for it."""
    piece = _own_of(body, path)
    if isinstance(piece.get("array"), str):
        return tensor_of(context.source.read(str(piece["array"])))
    coordinate = _ints(piece.get("coordinate"), path)
    names = cast("list[str]", body["placements"])
    writer = [
        0 if name == _named(Replicate()) else index
        for index, name in zip(coordinate, names, strict=True)
    ]
    for rank, other in _bodies(body, path, context):
        piece = _own_of(other, path)
        if piece.get("coordinate") == writer and isinstance(piece.get("array"), str):
            return tensor_of(context.source.read(str(piece["array"]), rank))
    raise CorruptError(f"No rank has written {dotted(path)} at {writer}.")


def _assembled(
    body: Mapping[str, object],
    path: TreePath,
    context: RestoreContext,
    offset: Ints,
    size: Ints,
) -> torch.Tensor:
    """Return a range of the tensor, assembled from the pieces of all ranks."""
    names = body.get("placements")
    if not isinstance(names, list) or any(_is_strided(str(name)) for name in names):
        raise UsageError(
            f"{dotted(path)} was saved with the placements {names}, whose pieces are "
            "not in one place. Restore it on the mesh that it was saved on."
        )
    dtype = dtype_of(str(body.get("kind")))
    if dtype is None or math.prod(size) > math.prod(_ints(body.get("shape"), path)):
        raise CorruptError(f"{dotted(path)} is of no kind or size that is known.")
    target = torch.empty(size, dtype=dtype)
    missing = math.prod(size)
    for piece in _pieces(body, path, context):
        missing -= _copy_overlap(target, offset, piece, context)
    if missing:
        raise CorruptError(f"The pieces of {dotted(path)} do not make the whole.")
    return target


def _copy_overlap(
    target: torch.Tensor, offset: Ints, piece: _Piece, context: RestoreContext
) -> int:
    source = tensor_of(context.source.read(piece.array, piece.rank))
    target_slices, source_slices = [], []
    for start, have, first, want in zip(
        piece.offset, source.shape, offset, target.shape, strict=True
    ):
        low, high = max(start, first), min(start + have, first + want)
        if low >= high:
            return 0
        target_slices.append(slice(low - first, high - first))
        source_slices.append(slice(low - start, high - start))
    part = source[tuple(source_slices)]
    target[tuple(target_slices)] = part
    return part.numel()


def _pieces(
    body: Mapping[str, object], path: TreePath, context: RestoreContext
) -> Iterator[_Piece]:
    for rank, other in _bodies(body, path, context):
        piece = _own_of(other, path)
        if isinstance(piece.get("array"), str):
            yield _Piece(rank, str(piece["array"]), _ints(piece.get("offset"), path))


def _bodies(
    body: Mapping[str, object], path: TreePath, context: RestoreContext
) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield the descriptions of the same tensor by the ranks of the same mesh."""
    common = {key: value for key, value in body.items() if key != "own"}
    for rank, encoded in context.source.elsewhere(path).items():
        tagged = encoded if isinstance(encoded, dict) and len(encoded) == 1 else {}
        for other in tagged.values():
            if isinstance(other, dict):
                same = {key: value for key, value in other.items() if key != "own"}
                if same == common:
                    yield rank, other


def _layout(value: DTensor, shape: Ints) -> dict[str, object]:
    mesh = value.device_mesh
    ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    return {
        "shape": list(shape),
        "mesh": {"shape": list(mesh.shape), "ranks": _ranges(ranks)},
        "placements": [_named(placement) for placement in value.placements],
    }


def _from_local(local: torch.Tensor, template: DTensor, shape: Ints) -> DTensor:
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensor.from_local(
        local.to(template.to_local().device),
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


def _offset(value: DTensor) -> Ints:
    """Return the offset of this rank's piece, as torch's own checkpoints have it."""
    [chunk] = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets)


def _coordinate(value: DTensor) -> Ints:
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        raise UsageError("a DTensor of a mesh that this rank is not part of")
    return tuple(coordinate)


def _named(placement: Placement) -> str:
    return str(placement)


def _is_strided(name: str) -> bool:
    return name.startswith("_")


def _require_contiguous(placements: tuple[Placement, ...], path: TreePath) -> None:
    for placement in placements:
        if type(placement) not in (Shard, Replicate):
            raise UsageError(
                f"{dotted(path)} is laid out as {placements} here, whose pieces are "
                "not in one place. Restore it on the mesh that it was saved on."
            )


def _own_of(body: Mapping[str, object], path: TreePath) -> Mapping[str, object]:
    piece = body.get("own")
    if not isinstance(piece, dict):
        raise CorruptError(f"{dotted(path)} does not describe this rank's piece of it.")
    return piece


def _ints(value: object, path: TreePath) -> Ints:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise CorruptError(f"{dotted(path)} has {str(value)[:40]} for a shape.")
    return tuple(value)


def _ranges(ranks: list[int]) -> str:
    """Return ranks as a short text: [0, 1, 2, 3] is "0-3"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in parts)


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
        address = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        return (address, self.shape, tensor.stride(), tensor.dtype, self.offset)

    def flat(self) -> Bytes:
        dense = self._tensor.to("cpu").resolve_conj().resolve_neg().contiguous()
        flat: Bytes = dense.reshape(-1).view(torch.uint8).numpy()
        return flat

    def copy_to(self, into: Bytes) -> None:
        _viewed_as(into, self._tensor.dtype, self.shape).copy_(self._tensor)


def encode_tensor(tensor: torch.Tensor, keep: Keep) -> str:
    """Keep a tensor for writing, and return the name of its array."""
    check(tensor)
    return keep(TorchArray(tensor))


def tensor_of(array: HostArray) -> torch.Tensor:
    """Return an array that was read as a tensor, in the same memory."""
    return _viewed_as(array.flat(), _OF_KIND[array.kind], array.shape)


def _viewed_as(data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
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
            "cannot be saved. Save its components, as dense tensors"
        )
    if tensor.dtype not in DTYPES:
        raise UsageError(
            f"a tensor of {tensor.dtype} cannot be saved. Known are "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )
