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
    """Have this rank's piece written if it is the rank to do so, and say what it is."""
    local = value.to_local()
    check(local.detach())
    if any(placement.is_partial() for placement in value.placements):
        raise UsageError(
            f"a DTensor with the placements {value.placements} is a sum that has not "
            "been made. Redistribute it before saving"
        )
    array = TorchArray(local, offset=_offset(value))
    owns = all(
        at == 0 or not placement.is_replicate()
        for at, placement in zip(_coordinate(value), value.placements, strict=True)
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
    body: Mapping[str, object], path: TreePath, held: RestoreContext
) -> torch.Tensor:
    """Return a tensor laid out as what lives at its place now."""
    like = held.like(path)
    shape = _ints(body.get("shape"), path)
    if not isinstance(like, DTensor):
        return _assembled(body, path, held, (0,) * len(shape), shape)
    if _layout(like, shape) == {key: body.get(key) for key in _layout(like, shape)}:
        return _from_local(_own(body, path, held), like, shape)
    if tuple(like.shape) != shape:
        raise UsageError(
            f"{dotted(path)} has the shape {shape} in the checkpoint, and belongs to "
            f"one of {tuple(like.shape)} here: it cannot be laid out anew. Restore it "
            "on the mesh that it was saved on."
        )
    _require_contiguous(like.placements, path)
    size = tuple(like.to_local().shape)
    return _from_local(_assembled(body, path, held, _offset(like), size), like, shape)


def laid_out(whole: torch.Tensor, path: TreePath, like: object) -> torch.Tensor:
    """Return this rank's piece of a whole tensor, if what lives there is a piece."""
    if not isinstance(like, DTensor) or like.shape != whole.shape:
        return whole
    _require_contiguous(like.placements, path)
    slices = tuple(
        slice(first, first + size)
        for first, size in zip(_offset(like), like.to_local().shape, strict=True)
    )
    return _from_local(whole[slices].clone(), like, tuple(whole.shape))


class _Piece(NamedTuple):
    rank: int
    array: str
    offset: Ints


def _own(
    body: Mapping[str, object], path: TreePath, held: RestoreContext
) -> torch.Tensor:
    """Return the piece of this rank, which another may have written for it."""
    own = _own_of(body, path)
    if isinstance(own.get("array"), str):
        return tensor_of(held.source.read(str(own["array"])))
    wanted = _ints(own.get("coordinate"), path)
    names = cast("list[str]", body["placements"])
    writer = [
        0 if name == _named(Replicate()) else at
        for at, name in zip(wanted, names, strict=True)
    ]
    for rank, other in _bodies(body, path, held):
        mine = _own_of(other, path)
        if mine.get("coordinate") == writer and isinstance(mine.get("array"), str):
            return tensor_of(held.source.read(str(mine["array"]), rank))
    raise CorruptError(f"No rank has written {dotted(path)} at {writer}.")


def _assembled(
    body: Mapping[str, object],
    path: TreePath,
    held: RestoreContext,
    offset: Ints,
    size: Ints,
) -> torch.Tensor:
    """Return a range of the whole, made of what the ranks have written of it."""
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
    for piece in _pieces(body, path, held):
        missing -= _copy_overlap(target, offset, piece, held)
    if missing:
        raise CorruptError(f"The pieces of {dotted(path)} do not make the whole.")
    return target


def _copy_overlap(
    target: torch.Tensor, offset: Ints, piece: _Piece, held: RestoreContext
) -> int:
    source = tensor_of(held.source.read(piece.array, piece.rank))
    into, of = [], []
    for there, have, first, want in zip(
        piece.offset, source.shape, offset, target.shape, strict=True
    ):
        low, high = max(there, first), min(there + have, first + want)
        if low >= high:
            return 0
        into.append(slice(low - first, high - first))
        of.append(slice(low - there, high - there))
    part = source[tuple(of)]
    target[tuple(into)] = part
    return part.numel()


def _pieces(
    body: Mapping[str, object], path: TreePath, held: RestoreContext
) -> Iterator[_Piece]:
    for rank, other in _bodies(body, path, held):
        own = _own_of(other, path)
        if isinstance(own.get("array"), str):
            yield _Piece(rank, str(own["array"]), _ints(own.get("offset"), path))


def _bodies(
    body: Mapping[str, object], path: TreePath, held: RestoreContext
) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield what the ranks of the same mesh say of the same tensor."""
    whole = {key: value for key, value in body.items() if key != "own"}
    for rank, encoded in held.source.elsewhere(path).items():
        tagged = encoded if isinstance(encoded, dict) and len(encoded) == 1 else {}
        for other in tagged.values():
            if isinstance(other, dict):
                same = {key: value for key, value in other.items() if key != "own"}
                if same == whole:
                    yield rank, other


def _layout(value: DTensor, shape: Ints) -> dict[str, object]:
    mesh = value.device_mesh
    ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    return {
        "shape": list(shape),
        "mesh": {"shape": list(mesh.shape), "ranks": _ranges(ranks)},
        "placements": [_named(placement) for placement in value.placements],
    }


def _from_local(local: torch.Tensor, like: DTensor, shape: Ints) -> DTensor:
    strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return DTensor.from_local(
        local.to(like.to_local().device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


def _offset(value: DTensor) -> Ints:
    """Return where this rank's piece begins, as torch's own checkpoints say it."""
    [chunk] = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets)


def _coordinate(value: DTensor) -> Ints:
    found = value.device_mesh.get_coordinate()
    if found is None:
        raise UsageError("a DTensor of a mesh that this rank is not part of")
    return tuple(found)


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
    own = body.get("own")
    if not isinstance(own, dict):
        raise CorruptError(f"{dotted(path)} does not say what this rank holds of it.")
    return own


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
