"""DTensors in a checkpoint: each rank's piece, and the whole made of pieces again.

Rule 1: a rank writes what it holds. Of ranks that hold the same, the first one writes.
Rule 2: on the same mesh and with the same placements a rank takes back its own piece.
Rule 3: on any other, it takes from all pieces what it holds there; never the whole,
        unless it holds the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeGuard, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from atoll.checkpoint.faces import Held, Keep, Path
from atoll.checkpoint.tree import dotted
from atoll.errors import CorruptError, UsageError
from atoll.torch.checkpointing_tensors import TorchArray, check, dtype_of, tensor_of

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


def decode_piece(body: Mapping[str, object], path: Path, held: Held) -> torch.Tensor:
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


def laid_out(whole: torch.Tensor, path: Path, like: object) -> torch.Tensor:
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


def _own(body: Mapping[str, object], path: Path, held: Held) -> torch.Tensor:
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
    body: Mapping[str, object], path: Path, held: Held, offset: Ints, size: Ints
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


def _copy_overlap(target: torch.Tensor, offset: Ints, piece: _Piece, held: Held) -> int:
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


def _pieces(body: Mapping[str, object], path: Path, held: Held) -> Iterator[_Piece]:
    for rank, other in _bodies(body, path, held):
        own = _own_of(other, path)
        if isinstance(own.get("array"), str):
            yield _Piece(rank, str(own["array"]), _ints(own.get("offset"), path))


def _bodies(
    body: Mapping[str, object], path: Path, held: Held
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


def _require_contiguous(placements: tuple[Placement, ...], path: Path) -> None:
    for placement in placements:
        if type(placement) not in (Shard, Replicate):
            raise UsageError(
                f"{dotted(path)} is laid out as {placements} here, whose pieces are "
                "not in one place. Restore it on the mesh that it was saved on."
            )


def _own_of(body: Mapping[str, object], path: Path) -> Mapping[str, object]:
    own = body.get("own")
    if not isinstance(own, dict):
        raise CorruptError(f"{dotted(path)} does not say what this rank holds of it.")
    return own


def _ints(value: object, path: Path) -> Ints:
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
