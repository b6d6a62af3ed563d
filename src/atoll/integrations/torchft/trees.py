"""Registered state as bytes and back: tensors as safetensors, the rest as JSON.

Rule 1: nothing is executed that is read: no pickle, no class is looked up by name.
Rule 2: bytes are hostile. Their digest has been verified when they come here, and what
        they say is still bounded and judged.
Rule 3: what cannot be carried exactly is refused by its path, not approximated.

JSON holds the shape of the tree; a list there is [tag, value, ...], and anything else
is a value. Keys of dictionaries may be numbers, as in the state of an optimizer.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.distributed.tensor import DTensor

from atoll.errors import CorruptError, UsageError

TREE = "tree"
MAX_DEPTH = 64
_SCALARS = (str, int, float, bool, type(None))
_NO_TREE = (
    SafetensorError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    RecursionError,
)
"""All that reading bytes of another kind can raise."""


def pack_tree(tree: object) -> bytes:
    """Return a tree of dictionaries, lists, tuples, tensors and plain values as bytes.

    Raises:
        UsageError: something in it cannot be carried, naming where it is.
    """
    tensors: dict[str, torch.Tensor] = {}
    shape = json.dumps(_shape_of(tree, tensors, "state")).encode()
    words = torch.frombuffer(bytearray(shape), dtype=torch.uint8)
    return save({TREE: words, **tensors})


def unpack_tree(data: bytes) -> Any:
    """Return the tree that `pack_tree` made these bytes of.

    Raises:
        CorruptError: it did not.
    """
    try:
        tensors = load(data)
        shape = json.loads(tensors.pop(TREE).numpy().tobytes())
        return _tree_of(shape, tensors, 0)
    except _NO_TREE as exc:
        raise CorruptError(
            f"A state of {len(data)} bytes does not hold what its island says: {exc!r}."
            " Start both islands with the same release."
        ) from exc


def _shape_of(value: object, tensors: dict[str, torch.Tensor], path: str) -> object:
    if path.count("/") > MAX_DEPTH:
        raise _uncarried(path, f"is more than {MAX_DEPTH} levels deep")

    def inner(key: object, each: object) -> object:
        return _shape_of(each, tensors, f"{path}/{key}")

    match value:
        case DTensor():
            raise _uncarried(path, "is sharded over several processes")
        case torch.Tensor():
            tensors[str(len(tensors))] = value.detach().cpu().contiguous().clone()
            return ["tensor", str(len(tensors) - 1)]
        case dict():
            for key in value:
                if type(key) not in (str, int):
                    raise _uncarried(path, f"has the key {key!r}, no text or number")
            pairs = [[key, inner(key, each)] for key, each in value.items()]
            return ["dict", *pairs]
        case list():
            return ["list", *(inner(at, each) for at, each in enumerate(value))]
        case tuple():
            return ["tuple", *(inner(at, each) for at, each in enumerate(value))]
    if type(value) in _SCALARS:
        return value
    raise _uncarried(path, f"is a {type(value).__name__}")


def _tree_of(shape: Any, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    if not isinstance(shape, list):
        if type(shape) not in _SCALARS:
            raise ValueError(f"a {type(shape).__name__} where a value belongs")
        return shape
    tag, *rest = shape
    if tag == "tensor":
        return tensors[rest[0]]
    if tag == "dict":
        return {key: _tree_of(each, tensors, depth + 1) for key, each in rest}
    parts = [_tree_of(each, tensors, depth + 1) for each in rest]
    if tag == "tuple":
        return tuple(parts)
    if tag == "list":
        return parts
    raise ValueError(f"the unknown tag {tag!r}")


def _uncarried(path: str, fact: str) -> UsageError:
    return UsageError(
        f"{path!r} of the registered state {fact}, and cannot be given to another "
        "island. Register a state dict of tensors, numbers, text, lists and "
        "dictionaries."
    )
