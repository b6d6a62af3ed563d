"""Incarnations of an island that trains vectors, and its checkpoints between them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from atoll import RunSettings
from atoll.exchange import Exchange, MemoryRun
from atoll.island import Host
from atoll.island.saved_state import SavedIsland, Tree, from_tree, to_tree
from atoll.protocol import JoinRequest
from atoll.testing import VectorView, vector_model
from atoll.weights.layout import F32

SHAPES = {f"layers.{n}.w": (40 + n,) for n in range(3)}


@dataclass
class Checkpoint:
    """The checkpoint that a training loop would have on its disk."""

    island: Tree
    local: list[F32]
    momentum: list[F32]


class Incarnation:
    """One incarnation of an island; each step depends on all steps before."""

    def __init__(
        self,
        run: Exchange,
        *,
        island: str = "a",
        checkpoint: Checkpoint | None = None,
        dtype: str = "float32",
    ) -> None:
        self.view = VectorView()
        model = vector_model(SHAPES, dtype=dtype)
        request = JoinRequest(model=model, island=island)
        saved = from_tree(checkpoint.island) if checkpoint else None
        view = Filled(self.view, checkpoint if saved and saved.is_exact else None)
        self.host = Host(run, view, request, saved=saved)
        local = self.view.local
        momentum = checkpoint.momentum if checkpoint else map(np.zeros_like, local)
        self.momentum = [vector.copy() for vector in momentum]

    @property
    def steps(self) -> int:
        return self.host.counters.inner_steps

    def train(self, steps: int) -> None:
        """Make inner steps until the run ends."""
        for _ in range(steps):
            if self.host.has_ended:
                return
            for index, local in enumerate(self.view.local):
                noise = np.random.default_rng([self.steps, index])
                slope = local + noise.normal(size=len(local)).astype(np.float32)
                self.momentum[index] = np.float32(0.5) * self.momentum[index] + slope
                moved = local - np.float32(0.1) * self.momentum[index]
                self.view.write(index, moved)
            self.host.counters.tokens += 7
            self.host.stepped()

    def idle(self, steps: int) -> None:
        """Make inner steps that change nothing."""
        for _ in range(steps):
            self.host.stepped()

    def save(self, *, is_exact: bool = True) -> Checkpoint:
        """Return a copy of the state, as a checkpoint would."""
        with self.host.saving(is_exact=is_exact) as saved:
            tree = copy.deepcopy(to_tree(saved))
        local = [vector.copy() for vector in self.view.local]
        return Checkpoint(tree, local, [vector.copy() for vector in self.momentum])

    def die(self) -> None:
        """End without publishing anything more."""
        self.host.leave(depart=False)

    def bits(self) -> bytes:
        """Return the bytes of all weights, momenta and states."""
        parts = [*self.view.local, *self.momentum]
        for slot in self.host.slots:
            parts.extend(slot.state.vectors)
            if slot.residual is not None:
                parts.append(slot.residual)
        return b"".join(part.tobytes() for part in parts)


class Filled:
    """A view whose weights a checkpoint has filled before the join."""

    def __init__(self, view: VectorView, checkpoint: Checkpoint | None) -> None:
        self._view, self._checkpoint = view, checkpoint

    def lay_out(self, layout: object) -> None:
        self._view.lay_out(layout)  # type: ignore[arg-type]
        if self._checkpoint is not None:
            self._view.local = [vector.copy() for vector in self._checkpoint.local]

    def read(self, fragment: int, out: F32) -> None:
        self._view.read(fragment, out)

    def write(self, fragment: int, values: F32) -> None:
        self._view.write(fragment, values)


def run_of(**tables: dict[str, object]) -> MemoryRun:
    """Return an empty run with these settings."""
    return MemoryRun(RunSettings.from_dict(tables))


def saved_in(checkpoint: Checkpoint) -> SavedIsland:
    return from_tree(checkpoint.island)
