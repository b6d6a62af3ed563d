"""A world over torch.distributed: the ranks of a process group, by gloo.

It creates two process groups, one for messages and one for parts, so that neither waits
for the other, and so that the model's own collectives are not disturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from struct import Struct

import numpy as np
import torch
import torch.distributed as dist

from atoll.errors import UsageError
from atoll.exchange.collective.channel import MAX_MESSAGE_BYTES
from atoll.exchange.collective.world import U8, Parts, RankUnreachable

TIMEOUT = timedelta(hours=1)
"""Timeout of gloo: the control channel detects dead ranks long before."""

_SIZE = Struct("<Q")


class GlooWorld:
    """This process's rank in a group. Implements `CollectiveWorld`.

    The constructor is a collective call: every rank of the group makes it.

    Raises:
        UsageError: there is no process group, or this process is not in it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "A collective needs torch.distributed. Call "
                "torch.distributed.init_process_group first, or start with torchrun."
            )
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        if self._rank < 0:
            raise UsageError(
                "This process is no rank of the group of the collective. Give a group "
                "that it belongs to."
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._messages, self._parts = _new_group(ranks), _new_group(ranks)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def send(self, rank: int, message: bytes) -> None:
        size = _SIZE.pack(len(message))
        for part in (size, message):
            data = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            _translated(partial(dist.send, data, group=self._messages, group_dst=rank))

    def receive(self, rank: int) -> bytes:
        (size,) = _SIZE.unpack(self._next(rank, _SIZE.size))
        if size > MAX_MESSAGE_BYTES:
            raise RankUnreachable(f"it announced a message of {size} bytes")
        return self._next(rank, size)

    def swap(self, outgoing: Parts, incoming: Parts) -> None:
        def start_and_wait() -> None:
            works = [
                dist.irecv(_tensor(part), group=self._parts, group_src=rank)
                for rank, part in incoming
            ]
            works += [
                dist.isend(_tensor(part), group=self._parts, group_dst=rank)
                for rank, part in outgoing
            ]
            for work in works:
                assert work is not None
                work.wait()

        _translated(start_and_wait)

    def _next(self, rank: int, size: int) -> bytes:
        data = np.empty(size, np.uint8)
        _translated(
            lambda: dist.recv(_tensor(data), group=self._messages, group_src=rank)
        )
        return data.tobytes()


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    group = dist.new_group(
        ranks, backend="gloo", timeout=TIMEOUT, use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _tensor(part: U8) -> torch.Tensor:
    """Return bytes as a tensor for gloo, without a copy."""
    return torch.from_numpy(part)


def _translated(act: Callable[[], object]) -> None:
    try:
        act()
    except RuntimeError as exc:  # gloo raises no other
        # The text is "[file:line] Fact. Common causes."
        fact = str(exc).partition("] ")[2].partition(". ")[0]
        raise RankUnreachable(fact or str(exc)) from exc
