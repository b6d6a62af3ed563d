"""Islands of several ranks that are killed, and started again by the same command."""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import atoll.torch
from atoll.checkpoint import COMPONENTS, Policy
from atoll.errors import RemoteError
from tests.torch.rank_loops import ROWS, net, rows_of, see, send_through, stage, wrapped


class Cursor:
    """Data with a place: numbers of rows, one for each inner step."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Loop:
    """One start of a training script, as one rank has it."""

    def __init__(self, rank: int, kind: str, name: str = "a") -> None:
        self.is_dealt = kind == "dealt"
        """Whether the data is sharded once the island has joined, and rarely saved."""

        kind = "ddp" if self.is_dealt else kind
        self.rank, self.kind, self.name = rank, kind, name
        self.trained: list[int] = []
        self.by = signal.SIGKILL
        self.part = stage(rank, 0) if kind == "pipeline" else None
        self.module = self.part.module if self.part else wrapped(kind, net(0), 2)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.data = Cursor()

    def live(
        self, run: str, directory: str, dies_at: int, dies: int | None, exact: bool
    ) -> dict[str, Any]:
        """Train until the run ends or `dies_at`, when one rank dies, or all."""
        policy = Policy(
            directory,
            every_rounds=9 if self.is_dealt else 1,
            components=COMPONENTS if exact else None,
            extra={} if self.is_dealt else {"data": self.data},
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            island = atoll.torch.join(
                self.part or self.module,
                self.optimizer,
                run,
                island=self.name,
                checkpoint=policy,
            )
        try:
            with island:
                for row in self._rows(island):
                    self.trained.append(row)
                    island.report(tokens=ROWS * self._backward(row))
                    if island.inner_steps == dies_at:
                        island._checkpointing.wait()  # type: ignore[union-attr]
                        if dies in (None, self.rank):
                            os.kill(os.getpid(), self.by)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        except (RemoteError, RuntimeError) as exc:
            return {"error": str(exc)}
        said = [str(each.message) for each in told]
        return {
            "digest": island.digest,
            "inner_steps": island.inner_steps,
            "round": island.round,
            "rows": self.trained,
            "told": [each for each in said if each.startswith("Island")],
        }

    def _rows(self, island: atoll.torch.Island) -> Iterator[int]:
        if not self.is_dealt:
            return iter(self.data)
        dealt = atoll.torch.shard(itertools.count(), island)
        return (row // island.place[1] for row in dealt)

    def _backward(self, row: int) -> int:
        """Return how many micro-batches were taken."""
        if self.part is not None:
            send_through(self.rank, self.module, rows_of(0, row, 0), 7)
            see(self.module, 0)
            return 1
        parts = [0, 1] if self.kind == "alone" else [self.rank]
        for each in parts:
            loss = self.module(rows_of(0, row, each)).square().mean()
            (loss / len(parts)).backward()
        see(self.module, parts[0])
        return len(parts)


def live(
    rank: int,
    kind: str,
    run: str,
    directory: str,
    dies_at: int = -1,
    dies: int | None = None,
    exact: bool = False,
    name: str = "a",
) -> dict[str, Any]:
    """Be one rank of an island, from the start of its program on."""
    return Loop(rank, kind, name).live(run, directory, dies_at, dies, exact)


def live_until_asked(
    rank: int, kind: str, run: str, directory: str, asked_at: int
) -> dict[str, Any]:
    """Be one rank of an island that is asked to end at its second rank."""
    loop = Loop(rank, kind)
    loop.by = signal.SIGTERM
    return loop.live(run, directory, asked_at, 1, True)


def live_whole(rank: int, run: str, directory: str, *how: Any) -> dict[str, Any]:
    """Be the island that is not cut: one process on the rows of one rank."""
    loop = Loop(rank, "alone")
    loop._backward = lambda row: _one(loop, row)  # type: ignore[method-assign]
    return loop.live(run, directory, *(how or (-1, None, False)))


def _one(loop: Loop, row: int) -> int:
    loop.module(rows_of(0, row, 0)).square().mean().backward()
    see(loop.module, 0)
    return 1
