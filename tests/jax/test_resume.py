"""Checkpoints of an island of JAX: what it saved, it goes on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from atoll.checkpoint import COMPONENTS, Policy
from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.jax import join
from tests.jax.islands import Params, run_of, values, weights

pytestmark = pytest.mark.jax

ROOT = Path(__file__).parents[2]
ADAM = optax.adam(0.125)


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Have SIGTERM as a process has it, whatever other software has made of it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def adam_step(params: Params, state: Any, slope: jax.Array) -> tuple[Params, Any]:
    """Return parameters and optimizer after a step of Adam; the state has a key."""
    moments, key = state
    key, now = jax.random.split(key)
    noise = jax.random.normal(now, params["w"].shape)
    updates, moments = ADAM.update({"w": slope + noise}, moments, params)
    trained: Params = optax.apply_updates(params, updates)
    return trained, (moments, key)


train_step = jax.jit(adam_step)


def begun() -> tuple[Params, Any]:
    params = weights(1.0, 2.0, 3.0)
    return params, (ADAM.init(params), jax.random.key(7))


def live(
    run: MemoryRun | str,
    directory: Path,
    *,
    until: int,
    is_exact: bool = True,
) -> tuple[list[float], Any]:
    """Train until SIGTERM comes after a step, and say where that was.

    So the checkpoint is of that step, and not of one before.
    """
    params, state = begun()
    components = COMPONENTS if is_exact else None
    policy = Policy(directory, components=components)
    with join(params, state, run, island="a", checkpoint=policy) as island:
        params, state = island.params, island.optimizer
        while True:
            slope = jnp.asarray(float(island.inner_steps % 3))
            params, state = train_step(params, state, slope)
            island.report(tokens=8)
            if island.inner_steps == until - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            params = island.stepped(params, optimizer=state)
    assert island.inner_steps == until
    return values(island.params), (state[0], values_of(state[1]))


def values_of(key: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(key))


def alike(left: Any, right: Any) -> bool:
    return bool(jax.tree.all(jax.tree.map(np.array_equal, left, right)))


def test_a_loop_alone_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Parameters, moments and the random key are those of a loop that never ended."""
    whole = live("none", tmp_path / "whole", until=9)
    for until in (4, 5, 9):
        cut = live("none", tmp_path / "cut", until=until)

    assert cut[0] == whole[0]
    assert alike(cut[1], whole[1])


class StepCount:
    """A loop's own state: the inner steps that it has made. Implements `Stateful`."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize("component", ["trainer", "scheduler"])
@pytest.mark.parametrize("donated", [(0, 1), ()])
def test_a_checkpoint_is_of_one_step_when_stepped_returns(
    tmp_path: Path, component: str, donated: tuple[int, ...]
) -> None:
    """The next step may donate the state, and change what the loop keeps itself."""
    step = jax.jit(adam_step, donate_argnums=donated)
    params, state = begun()
    count, run = StepCount(), run_of()
    policy = Policy(tmp_path, every_rounds=1, extra={component: count})
    with join(params, state, run, island="a", checkpoint=policy) as island:
        params, state = island.params, island.optimizer
        for _ in range(4):
            params, state = step(params, state, jnp.asarray(1.0))
            count.steps += 1
            island.report(tokens=8)
            params = island.stepped(params, optimizer=state)

    params, state = begun()
    restored = StepCount()
    policy = Policy(tmp_path, extra={component: restored})
    later = join(params, state, run, island="a", checkpoint=policy)
    assert restored.steps == int(later.optimizer[0][0].count) > 0
    later.leave()


def test_an_island_takes_back_its_optimizer_and_the_runs_weights(
    tmp_path: Path,
) -> None:
    """Without the model in the checkpoint the island rejoins with its moments."""
    run = run_of(every=2)
    live(run, tmp_path, until=5, is_exact=False)
    params, state = begun()
    later = join(params, state, run, island="a", checkpoint=tmp_path)

    assert int(later.optimizer[0][0].count) == 5
    assert values(later.params) == later.anchor()["w"].tolist()
    later.leave()


def test_a_step_that_gives_no_optimizer_is_refused(tmp_path: Path) -> None:
    """A checkpoint without moments would be found out too late."""
    params, state = begun()
    island = join(params, state, run_of(), checkpoint=tmp_path)
    with pytest.raises(UsageError, match=r"island\.stepped\(params, optimizer=state\)"):
        island.stepped(island.params)
    island.leave()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda p, s: ({"v": p["w"]}, s), r"'[vw]', which is not in the"),
        (lambda p, s: ({"w": p["w"][:2]}, s), r"float32 of shape \(2,\) here, and"),
        (lambda p, s: (p, (s[0],)), r"optimizer has the leaf .* not in the program"),
    ],
)
def test_trees_that_were_not_saved_are_refused(
    tmp_path: Path, change: Any, match: str
) -> None:
    """The message names the leaf, and both sides."""
    live("none", tmp_path, until=2)
    params, state = change(*begun())
    policy = Policy(tmp_path, components=COMPONENTS)
    with pytest.raises(UsageError, match=match):
        join(params, state, "none", checkpoint=policy)


def test_every_kind_of_number_comes_back(tmp_path: Path) -> None:
    """What JAX computes with can be in an optimizer's state, whole and unchanged."""
    kinds = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32")
    floats = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
    state: dict[str, Any] = {k: jnp.ones((2, 3), k) for k in (*kinds, *floats)}
    state |= {"none": jnp.zeros((0, 2)), "one": jnp.asarray(1.5)}
    blank = jax.tree.map(jnp.zeros_like, state)
    state, blank = {**state, "steps": 3}, {**blank, "steps": 0}
    join(weights(1.0), state, "none", checkpoint=tmp_path).leave()

    later = join(weights(1.0), blank, "none", checkpoint=tmp_path)
    found = later.optimizer
    later.leave()

    assert alike(found, state)
    assert {k: v.dtype.name for k, v in found.items() if k in kinds + floats} == {
        kind: kind for kind in kinds + floats
    }


def test_numbers_that_would_be_narrowed_are_refused(tmp_path: Path) -> None:
    """Without x64 JAX makes fp64 fp32 and says nothing: going on would not be exact."""
    with jax.enable_x64(True):
        state = {"v": jnp.full(2, 1.0 + 2.0**-40, "float64")}
        join(weights(1.0), state, "none", checkpoint=tmp_path).leave()

    blank = {"v": jnp.zeros(2)}
    with pytest.raises(UsageError, match=r"float64, which JAX makes float32"):
        join(weights(1.0), blank, "none", checkpoint=tmp_path)


def test_sharded_parameters_keep_their_shardings() -> None:
    """On four devices all is as on one, and every array is where it was."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.jax.sharded_islands"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)

    assert said["devices"] == 4
    for what in ("kept", "restored", "equal"):
        assert said[what] == [True] * 4, what
    assert said["one_digest"]
