"""torch and JAX are one algorithm: the same gradients give the same trajectory.

Both begin with the same parameters and take the same gradients with inner SGD, once by
torch.optim and once by a jitted function. With dyadic numbers no inner step is rounded,
so that everything must agree to the bit; with any others both may contract the inner
step into one operation, and agree to 1e-6.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import atoll.jax
import atoll.torch
from atoll.exchange import MemoryRun
from tests.jax.islands import settings_of, together

pytestmark = [pytest.mark.jax, pytest.mark.torch]

EVERY = 4
ROUNDS = 2
STEPS = (ROUNDS + 1) * EVERY
"""More than an island makes: it ends with its last round."""

SHAPES = {
    "embed": (5, 3),
    "head": (3,),
    "layers.0.weight": (3, 3),
    "layers.0.bias": (3,),
    "layers.1.weight": (3, 4),
    "layers.1.bias": (4,),
    "layers.2.weight": (4, 3),
    "layers.2.bias": (3,),
}
SCHEDULES: dict[str, dict[str, object]] = {
    "vanilla": {},
    "streaming": {"num_fragments": 3},
    "own rest": {"num_fragments": 3, "rest": "own", "fragment_order": "sequential"},
    "overlap": {"overlap_steps": 2},
    "streaming overlap": {"num_fragments": 3, "overlap_steps": 3},
}
ADOPTS: dict[str, dict[str, object]] = {
    "rebase": {},
    "mix": {"adopt": "mix", "keep_local": 0.5},
}
OUTERS: dict[str, dict[str, object]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.5},
    "heavy ball": {"optimizer": "heavy_ball", "lr": 0.5, "momentum": 0.5},
    "nesterov": {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5},
    "adam": {"optimizer": "adam", "lr": 0.5},
}

Arrays = dict[str, np.ndarray]
Trajectory = list[Arrays]
Lived = tuple[Trajectory, str]
Live = Callable[..., Lived]


def drawn(seed: list[int], *, is_dyadic: bool) -> Arrays:
    """Return numbers of every shape: any, or sixteenths between -2 and 2."""
    numbers = np.random.default_rng(seed)
    if is_dyadic:
        return {
            name: (numbers.integers(-32, 33, shape) / 16).astype(np.float32)
            for name, shape in SHAPES.items()
        }
    return {
        name: numbers.normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def gradients(island: int, *, is_dyadic: bool) -> list[Arrays]:
    """Return what an island takes at each of its inner steps."""
    return [drawn([island, step], is_dyadic=is_dyadic) for step in range(STEPS)]


class Torch(torch.nn.Module):
    """A module with the parameters of `SHAPES`, in their order."""

    def __init__(self, values: Arrays) -> None:
        super().__init__()
        for name, value in values.items():
            *path, last = name.split(".")
            owner: torch.nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            parameter = torch.nn.Parameter(torch.from_numpy(value.copy()))
            owner.register_parameter(last, parameter)

    def values(self) -> Arrays:
        return {n: p.detach().numpy().copy() for n, p in self.named_parameters()}


def in_torch(
    run: MemoryRun, name: str, steps: list[Arrays], *, is_dyadic: bool
) -> Lived:
    """Live as an island of torch, and return the weights after each step."""
    model = Torch(drawn([99], is_dyadic=is_dyadic))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    lived = []
    with atoll.torch.join(model, optimizer, run, island=name, on_end="flag") as island:
        for step in steps:
            for path, parameter in model.named_parameters():
                parameter.grad = torch.from_numpy(step[path].copy())
            optimizer.step()
            lived.append(model.values())
            if island.should_stop:
                break
    assert island.ended
    return lived, island.digest


@jax.jit
def descend(params: Any, slopes: Any) -> Any:
    """Return the parameters after one step of inner SGD."""
    return jax.tree.map(lambda leaf, slope: leaf - 0.25 * slope, params, slopes)


def tree_of(values: Arrays) -> dict[str, Any]:
    """Return arrays as people nest them in JAX, whose dicts have no order."""
    tree: dict[str, Any] = {"layers": [{}, {}, {}]}
    for name, value in values.items():
        first, *rest = name.split(".")
        if rest:
            tree["layers"][int(rest[0])][rest[1]] = jnp.asarray(value)
        else:
            tree[first] = jnp.asarray(value)
    return tree


def flat_of(tree: dict[str, Any]) -> Arrays:
    found = {name: np.asarray(tree[name]) for name in ("embed", "head")}
    for at, layer in enumerate(tree["layers"]):
        found |= {f"layers.{at}.{n}": np.asarray(value) for n, value in layer.items()}
    return found


def in_jax(run: MemoryRun, name: str, steps: list[Arrays], *, is_dyadic: bool) -> Lived:
    """Live as an island of JAX, and return the weights after each step."""
    params = tree_of(drawn([99], is_dyadic=is_dyadic))
    lived = []
    with atoll.jax.join(
        params, run=run, island=name, on_end="flag", names=list(SHAPES)
    ) as island:
        params = island.params
        for step in steps:
            params = island.stepped(descend(params, tree_of(step)))
            lived.append(flat_of(params))
            if island.should_stop:
                break
    assert island.ended
    return lived, island.digest


def lived_by(
    lives: tuple[Live, Live], tables: dict[str, dict[str, object]], *, is_dyadic: bool
) -> list[Lived]:
    """Let two islands train, and return what each of them went through."""
    ends: dict[str, object] = {"end_rounds": ROUNDS}
    run = MemoryRun(settings_of(2, every=EVERY, run=ends, **tables))
    steps = [gradients(number, is_dyadic=is_dyadic) for number in range(2)]
    return together(
        *(
            partial(live, run, f"island-{number}", steps[number], is_dyadic=is_dyadic)
            for number, live in enumerate(lives)
        )
    )


def furthest(ours: Trajectory, theirs: Trajectory) -> float:
    """Return how far two trajectories are apart at most, in any weight at any step."""
    return max(
        float(np.abs(a[name] - b[name]).max())
        for a, b in zip(ours, theirs, strict=True)
        for name in SHAPES
    )


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("adopt", ADOPTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_and_jax_go_the_same_way(schedule: str, adopt: str, outer: str) -> None:
    """Every schedule, adopt rule and outer optimizer gives one trajectory in both."""
    sync = {**SCHEDULES[schedule], **ADOPTS[adopt]}
    tables = {"sync": sync, "outer": OUTERS[outer]}

    for is_dyadic, tolerance in ((True, 0.0), (False, 1e-6)):
        torches = lived_by((in_torch, in_torch), tables, is_dyadic=is_dyadic)
        jaxes = lived_by((in_jax, in_jax), tables, is_dyadic=is_dyadic)
        for (ours, digest), (theirs, same) in zip(jaxes, torches, strict=True):
            assert furthest(ours, theirs) <= tolerance
            assert digest == same or not is_dyadic


def in_one_program(tables: dict[str, dict[str, object]]) -> Iterator[list[Trajectory]]:
    """Yield the trajectories of two islands that `diloco` trains: dyadic, then not."""

    def train_step(state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        return descend(state, batch), ()

    init, step = atoll.jax.diloco(
        train_step,
        lambda state: state,
        settings_of(2, every=EVERY, **tables),
        num_islands=2,
    )
    for is_dyadic in (True, False):
        state = init(ordered(drawn([99], is_dyadic=is_dyadic)))
        given = [gradients(number, is_dyadic=is_dyadic) for number in range(2)]
        lived: list[Trajectory] = [[], []]
        for pair in zip(*given, strict=True):
            both = jax.tree.map(lambda *each: np.stack(each), *map(ordered, pair))
            state, _ = step(state, both)
            now = {name: np.asarray(leaf) for name, leaf in state.islands.items()}
            for number in range(2):
                own = {name: leaf[number].copy() for name, leaf in now.items()}
                lived[number].append(own)
        yield lived


def ordered(values: Arrays) -> OrderedDict[str, Any]:
    """Return arrays as a tree with torch's order."""
    return OrderedDict((name, jnp.asarray(value)) for name, value in values.items())


@pytest.mark.timeout(300)  # every case compiles programs of its own
@pytest.mark.parametrize(
    ("schedule", "adopt", "outer"),
    [
        ("vanilla", "rebase", "sgd"),
        ("streaming", "rebase", "heavy ball"),
        ("overlap", "mix", "nesterov"),
        ("streaming overlap", "rebase", "nesterov"),
        ("streaming overlap", "mix", "adam"),
    ],
)
def test_islands_in_one_program_go_torchs_way(
    schedule: str, adopt: str, outer: str
) -> None:
    """`diloco` leads where torch islands in a run go, after every inner step."""
    sync = {**SCHEDULES[schedule], **ADOPTS[adopt]}
    tables = {"sync": sync, "outer": OUTERS[outer]}

    for is_dyadic, programs in zip((True, False), in_one_program(tables), strict=True):
        torches = lived_by((in_torch, in_torch), tables, is_dyadic=is_dyadic)
        for (theirs, _), ours in zip(torches, programs, strict=True):
            apart = furthest(ours[: len(theirs)], theirs)
            assert apart <= (0.0 if is_dyadic and outer != "adam" else 1e-6)


@pytest.mark.parametrize("outer", ["nesterov", "adam"])
def test_one_run_may_have_islands_of_both(outer: str) -> None:
    """A torch island and a JAX island agree on one digest, and on the runs of one."""
    tables = {"sync": SCHEDULES["streaming overlap"], "outer": OUTERS[outer]}
    mixed = lived_by((in_torch, in_jax), tables, is_dyadic=True)
    alike = lived_by((in_torch, in_torch), tables, is_dyadic=True)

    assert mixed[0][1] == mixed[1][1] == alike[0][1]
    for ours, theirs in zip(mixed, alike, strict=True):
        assert furthest(ours[0], theirs[0]) == 0.0


def test_a_torch_modules_state_is_a_tree() -> None:
    """An OrderedDict has torch's names and order, so that nothing must be mapped."""
    module = Torch(drawn([99], is_dyadic=True))
    run = MemoryRun(settings_of(1))
    params = OrderedDict(
        (name, jnp.asarray(value.detach().numpy()))
        for name, value in module.named_parameters()
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
    with (
        atoll.jax.join(params, run=run, island="jax") as ours,
        atoll.torch.join(module, optimizer, run, island="torch") as theirs,
    ):
        assert ours.digest == theirs.digest


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_half_precision_is_cast_alike(kind: str) -> None:
    """Parameters in 16 bits load the same bits from an anchor that has 32."""
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    ways = []
    for framework in ("torch", "jax"):
        run = MemoryRun(settings_of(1, outer={"optimizer": "sgd", "lr": 0.3}))
        if framework == "torch":
            module = torch.nn.ParameterDict(
                {"w": torch.from_numpy(values).to(getattr(torch, kind))}
            )
            descent = torch.optim.SGD(module.parameters(), lr=1.0)
            with atoll.torch.join(module, descent, run) as theirs:
                for _ in range(3):
                    module["w"].grad = torch.full_like(module["w"], 0.125)
                    descent.step()
                digest = theirs.digest
            ways.append((module["w"].detach().float().numpy().tolist(), digest))
        else:
            params = {"w": jnp.asarray(values, kind)}
            with atoll.jax.join(params, run=run) as ours:
                params = ours.params
                for _ in range(3):
                    params = ours.stepped(
                        {"w": params["w"] - params["w"].dtype.type(0.125)}
                    )
                digest = ours.digest
            ways.append((np.asarray(params["w"], np.float32).tolist(), digest))

    assert ways[0] == ways[1]
