"""PyTorch's values in a checkpoint: the face that `atoll.checkpoint` finds by name.

Tensors are arrays; a DTensor is a piece that each rank writes, with its place in the
whole. torch.distributed.checkpoint keeps its own account of such pieces in a pickle, so
the pieces are in safetensors with the offsets where its reader of safetensors looks for
them, and the account is in our own tree.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atoll.checkpoint.faces import Face, Held, Holder, Keep, Path
from atoll.checkpoint.ranks import Ranks
from atoll.errors import CorruptError
from atoll.torch.checkpointing_holders import (
    GeneratorHolder,
    ModuleHolder,
    OptimizerHolder,
    ProcessGenerators,
)
from atoll.torch.checkpointing_ranks import WorldRanks, world_size
from atoll.torch.checkpointing_shards import (
    decode_piece,
    encode_piece,
    is_piece,
    laid_out,
)
from atoll.torch.checkpointing_tensors import DTYPES, encode_tensor, tensor_of

TENSOR = "!torch.tensor"
PIECE = "!torch.piece"
SIZE = "!torch.size"
DTYPE = "!torch.dtype"
DEVICE = "!torch.device"

_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class TorchFace:
    """Implements `Face`."""

    def encode(self, value: object, keep: Keep) -> tuple[str, object] | None:
        if isinstance(value, torch.Tensor):
            if is_piece(value):
                return PIECE, encode_piece(value, keep)
            return TENSOR, encode_tensor(value, keep)
        if isinstance(value, torch.Size):
            return SIZE, list(value)
        if isinstance(value, torch.dtype) and value in DTYPES:
            return DTYPE, str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return DEVICE, str(value)
        return None

    def decode(self, tag: str, body: object, path: Path, held: Held) -> object:
        if tag == TENSOR and isinstance(body, str):
            return laid_out(tensor_of(held.source.read(body)), path, held.like(path))
        if tag == PIECE and isinstance(body, dict):
            return decode_piece(body, path, held)
        if tag == SIZE and isinstance(body, list) and all(type(n) is int for n in body):
            return torch.Size(body)
        if tag == DTYPE and isinstance(body, str) and body in _DTYPE_NAMES:
            return _DTYPE_NAMES[body]
        if tag == DEVICE and isinstance(body, str):
            return _device(body)
        raise CorruptError(
            f"{tag[:40]!r} with {str(body)[:60]!r} is no value of torch."
        )

    def holder(self, value: object, objects: Mapping[str, object]) -> Holder | None:
        if isinstance(value, torch.nn.Module):
            return ModuleHolder(value)
        if isinstance(value, torch.optim.Optimizer):
            return OptimizerHolder(value, objects)
        if isinstance(value, torch.Generator):
            return GeneratorHolder(value)
        return None

    def random(self) -> Holder:
        return ProcessGenerators()

    def ranks(self) -> Ranks | None:
        return WorldRanks() if world_size() > 1 else None


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as exc:
        raise CorruptError(f"{text[:40]!r} is no device of torch.") from exc


FACE: Face = TorchFace()
