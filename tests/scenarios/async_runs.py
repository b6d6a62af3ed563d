"""Asynchronous runs of islands of different speeds, in virtual time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll import RunSettings
from atoll.island import Host
from atoll.island.saved_state import from_tree, to_tree
from atoll.protocol import ModelSpec, TensorSpec
from atoll.simulate import FaultPlan
from atoll.testing import (
    VectorView,
    VirtualIsland,
    VirtualRun,
    vector_model,
    virtual_run,
)
from tests.island.incarnations import Checkpoint, Filled

EVERY, BUFFER = 16, 4
SEEN = TensorSpec(name="seen", shape=(5,), dtype="float32", role="buffer")
MODEL = vector_model({"layers.0.w": (33,), "layers.1.w": (30,)})
WITH_BUFFERS = ModelSpec((*MODEL.tensors, SEEN))
DRIFT = 1 / 64
"""An inner step moves every weight by this."""

Train = Callable[[Host, VectorView, int], None]
"""Changes the live weights by one inner step, given the island's number."""


def settings(
    *, mode: str = "async", tables: Mapping[str, dict[str, Any]] | None = None
) -> RunSettings:
    """Return settings whose anchor moves by the updates that counted, over 4."""
    default: dict[str, dict[str, Any]] = {
        "run": {"start_islands": 2, "end_rounds": 30},
        "sync": {"sync_every": EVERY, "overlap_steps": 4},
        "wire": {"up": "fp32", "down": "fp32"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
        "async": {"buffer": BUFFER} if mode == "async" else {},
    }
    for table, values in (tables or {}).items():
        default[table] = {**default.get(table, {}), **values}
    default["sync"]["mode"] = mode
    return RunSettings.from_dict(default)


def drift(host: Host, view: VectorView, number: int) -> None:
    """Move every weight by the same, on one token."""
    for local in view.local:
        local -= np.float32(DRIFT)
    host.count_tokens(1)


def learn(host: Host, view: VectorView, number: int) -> None:
    """Move the weights towards a target of each island, with noise, on some tokens."""
    rng = np.random.default_rng([host.counters.inner_steps, number])
    for local in view.local:
        local += rng.normal(size=len(local)).astype(np.float32) - local / 8
    host.count_tokens(3 + number)


@dataclass
class Observed:
    """The states and rosters that the islands of a run have held."""

    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Of the states after rounds, by fragment and round."""

    anchors: dict[tuple[int, int], float] = field(default_factory=dict)
    """The first value of each."""

    ages: list[int] = field(default_factory=list)
    """Of updates in the rosters that an island held between two inner steps."""

    hosts: dict[str, Host] = field(default_factory=dict)
    """The last incarnation of each island."""

    resumed: list[Host] = field(default_factory=list)
    weights: dict[str, bytes] = field(default_factory=dict)
    """The live weights of each island at its end."""

    def look(self, host: Host) -> None:
        """Note the states of an island; two islands have the same after a round."""
        for slot in host.slots:
            key = slot.index, slot.state.round
            assert self.digests.setdefault(key, slot.state.digest) == slot.state.digest
            self.anchors[key] = float(slot.state.anchor[0])
            for outcome in slot.outcomes:
                assert outcome.roster is not None
                self.ages += [entry.age for entry in outcome.roster.counted]


@dataclass
class Stops:
    """When an island ends before the run: after how many inner steps, and how."""

    after_steps: int
    act: Callable[[Host], object] = lambda host: host.leave()


def train(
    run: RunSettings,
    *paces_s: float,
    step: Train = drift,
    faults: FaultPlan | None = None,
    stops: Mapping[str, Stops] | None = None,
    save_every: int = 0,
    is_exact: bool = False,
    seed: int = 0,
    model: ModelSpec = MODEL,
) -> tuple[VirtualRun, Observed]:
    """Train islands of these paces to the end of a run.

    With `save_every` each island saves its work after that many inner steps, or its
    exact state, and an incarnation after its death resumes from that.
    """
    seen = Observed()
    checkpoints: dict[str, Checkpoint] = {}

    def loop(island: VirtualIsland) -> str:
        view, number = VectorView(), int(island.name[1:])
        checkpoint = checkpoints.get(island.name)
        tree = checkpoint.island if checkpoint else None
        filled = Filled(view, checkpoint if is_exact else None)
        host = island.join(model, filled, saved=from_tree(tree) if tree else None)
        seen.hosts[island.name] = host
        seen.resumed += [host] if tree else []
        stop = (stops or {}).get(island.name)
        while not host.has_ended:
            island.work(paces_s[number])
            step(host, view, number)
            host.stepped()
            seen.look(host)
            if save_every and host.counters.inner_steps % save_every == 0:
                with host.saving(is_exact=is_exact) as saved:
                    tree = copy.deepcopy(to_tree(saved))
                local = [vector.copy() for vector in view.local]
                checkpoints[island.name] = Checkpoint(tree, local, [])
            if stop and host.counters.inner_steps >= stop.after_steps:
                stop.act(host)
                break
        if not host.has_left:
            host.leave()
        seen.weights[island.name] = b"".join(local.tobytes() for local in view.local)
        return host.digest

    result = virtual_run(loop, run, islands=len(paces_s), faults=faults, seed=seed)
    assert result.failures == {}
    return result, seen
