"""Whole states through orbax: saved once, restored only as what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
import pytest

from atoll import RunSettings
from atoll.errors import CorruptError, UsageError
from atoll.jax import DilocoState, diloco, join, restore, save
from tests.jax.islands import Params, run_of, settings_of, train, values

pytestmark = pytest.mark.jax

SETTINGS = settings_of(4, every=30)


class State(NamedTuple):
    """As many kinds of leaves as a state has: of others' classes, nested, and none."""

    params: Params
    flights: tuple[Any, ...]
    key: jax.Array
    inner_steps: Any


def made(fill: float) -> State:
    return State(
        params={"w": jnp.full(3, fill, jnp.bfloat16), "layers": [jnp.full(2, fill)]},
        flights=(jnp.full((2, 2), int(fill), jnp.int8), (), None),
        key=jax.random.key(int(fill)),
        inner_steps=np.int32(fill),
    )


def same(left: Any, right: Any) -> bool:
    def numbers(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    def alike(one: Any, other: Any) -> bool:
        return bool(np.array_equal(numbers(one), numbers(other)))

    return bool(jax.tree.all(jax.tree.map(alike, left, right)))


def test_the_last_step_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every leaf has its value, dtype and place; an older step is there as well."""
    save(tmp_path, made(3.0), step=9, settings=SETTINGS)
    save(tmp_path, made(5.0), step=10, settings=SETTINGS)

    last = restore(tmp_path, made(0.0), settings=SETTINGS)
    older = restore(tmp_path, made(0.0), settings=SETTINGS, step=9)

    assert (last.step, older.step) == (10, 9)
    assert same(last.state, made(5.0))
    assert same(older.state, made(3.0))
    assert last.state.params["w"].dtype == jnp.bfloat16


def test_shapes_are_enough_to_restore(tmp_path: Path) -> None:
    """No second state is computed, or takes memory, to read the first."""
    save(tmp_path, made(3.0), step=0, settings=SETTINGS)
    like = jax.eval_shape(lambda: made(0.0)._replace(inner_steps=jnp.int32(0)))

    assert same(restore(tmp_path, like, settings=SETTINGS).state, made(3.0))


def test_a_step_is_never_written_again(tmp_path: Path) -> None:
    """What is there stays what it is."""
    save(tmp_path, made(3.0), step=9, settings=SETTINGS)
    with pytest.raises(UsageError, match=r"step-9 exists already"):
        save(tmp_path, made(5.0), step=9, settings=SETTINGS)

    assert same(restore(tmp_path, made(0.0), settings=SETTINGS).state, made(3.0))


def test_what_is_not_finished_is_not_there(tmp_path: Path) -> None:
    """A save that was cut short leaves a directory that nobody reads."""
    save(tmp_path, made(3.0), step=1, settings=SETTINGS)
    (tmp_path / "step-2.orbax-checkpoint-tmp").mkdir()

    assert restore(tmp_path, made(0.0), settings=SETTINGS).step == 1


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    """A schedule or a codec that changed would give the state another meaning."""
    save(tmp_path, made(3.0), step=1, settings=SETTINGS)
    other = SETTINGS.with_values({"sync.sync_every": 31})
    with pytest.raises(UsageError, match=r"sync\.sync_every is 31 here, and was 30"):
        restore(tmp_path, made(0.0), settings=other)


def test_another_tree_is_refused_by_name(tmp_path: Path) -> None:
    """The leaf is named, with both sides."""
    save(tmp_path, made(3.0), step=1, settings=SETTINGS)
    other = made(0.0)._replace(params={"w": jnp.zeros(4), "layers": []})
    with pytest.raises(UsageError, match=r"'params\.layers\.0' is absent here, and"):
        restore(tmp_path, other, settings=SETTINGS)


def test_an_absent_step_is_said(tmp_path: Path) -> None:
    """What there is, is listed."""
    with pytest.raises(UsageError, match=r"holds no state that was saved whole"):
        restore(tmp_path, made(0.0), settings=SETTINGS)
    save(tmp_path, made(3.0), step=1, settings=SETTINGS)
    with pytest.raises(UsageError, match=r"step-7 does not exist\. There are step-1"):
        restore(tmp_path, made(0.0), settings=SETTINGS, step=7)


def test_a_damaged_state_is_corrupt(tmp_path: Path) -> None:
    """Files that are lost are not made up."""
    place = save(tmp_path, made(3.0), step=1, settings=SETTINGS)
    for file in (place / "state").rglob("*"):
        if file.is_file():
            file.unlink()

    with pytest.raises(CorruptError, match=r"step-1/state cannot be read"):
        restore(tmp_path, made(0.0), settings=SETTINGS)


@pytest.mark.parametrize("step", [-1, True, 1.5])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    """Nothing is written under a name that could not be found."""
    with pytest.raises(UsageError, match=r"must be a whole number"):
        save(tmp_path, made(3.0), step=step, settings=RunSettings())


def test_a_donated_state_is_named(tmp_path: Path) -> None:
    """Saving what the next step has consumed is the loop's mistake."""
    state = made(3.0)
    state.params["w"].delete()
    with pytest.raises(UsageError, match=r"'params\.w' was deleted"):
        save(tmp_path, state, step=1, settings=SETTINGS)


@pytest.mark.timeout(300)  # compiles its programs
def test_islands_of_one_program_go_on_to_the_bit_with_updates_in_the_air(
    tmp_path: Path,
) -> None:
    """Inner, outer and in-flight state come back; any tree that fits may be given."""
    sync = {"sync_every": 4, "num_fragments": 2, "overlap_steps": 2}
    chosen = RunSettings.from_dict({"sync": sync, "wire": {"up": "int8"}})
    init, step = diloco(
        lambda state, batch, rng: (jax.tree.map(lambda p: p - batch, state), ()),
        lambda state: state,
        chosen,
        num_islands=2,
    )
    first = {"h": [{"w": jnp.ones(3)}, {"w": jnp.ones(5)}]}

    def on(state: DilocoState, begin: int, end: int) -> DilocoState:
        for number in range(begin, end):
            state, _ = step(state, jnp.asarray([0.01 * number, -0.3]))
        return state

    # Sent after steps 2 and 4, to land two later: at 5 a fragment is in the air.
    cut = on(init(first), 0, 5)
    save(tmp_path, cut, step=5, settings=chosen)
    whole = on(cut, 5, 11)

    for like in (init(first), init.abstract(first)):
        found = restore(tmp_path, like, settings=chosen)
        assert int(found.state.inner_steps) == found.step == 5
        assert same(on(found.state, 5, 11), whole)


def test_a_plain_checkpoint_seeds_a_run_and_a_run_exports_one(tmp_path: Path) -> None:
    """What any program of orbax has written founds a run, and can read its anchor."""
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "seed", {"w": jnp.array([4.0, 8.0])})
        orbax.wait_until_finished()
        seed = orbax.restore(tmp_path / "seed", {"w": jnp.zeros(2)})
        with join(seed, run=run_of(every=2)) as island:
            train(island, steps=3)
            with island.evaluating() as at:
                orbax.save(tmp_path / "out", at.params)
                orbax.wait_until_finished()
        exported = orbax.restore(tmp_path / "out", {"w": jnp.zeros(2)})

    # Two of the three steps were agreed when the anchor was exported.
    assert values(exported) == [2.0, 6.0]
