"""The ranks of torch.distributed's world, as a checkpoint knows them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def world_size() -> int:
    """Return how many processes there are; 1 without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size()


class WorldRanks:
    """All processes of the default group. Implements `Ranks`.

    Words travel as bytes in tensors: what torch sends as objects it pickles.
    """

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def gather(self, word: str) -> list[str]:
        data = word.encode("utf-8", "replace")
        device = _device()
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in self._each()]
        dist.all_gather(sizes, torch.tensor([len(data)], device=device))
        room = max(1, max(int(size) for size in sizes))
        padded = torch.zeros(room, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(
            bytearray(data or b"\0"), dtype=torch.uint8
        )[: len(data)]
        words = [torch.zeros(room, dtype=torch.uint8, device=device) for _ in sizes]
        dist.all_gather(words, padded.to(device))
        return [
            bytes(each[: int(size)].cpu().numpy()).decode("utf-8", "replace")
            for each, size in zip(words, sizes, strict=True)
        ]

    def _each(self) -> range:
        return range(self.size)


def _device() -> torch.device:
    """Return where the group's tensors must be."""
    if "gloo" in dist.get_backend() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
