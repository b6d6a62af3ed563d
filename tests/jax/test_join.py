"""A loop of JAX as an island: what it gives, what it gets back, what it is told."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import atoll
from atoll import RunSettings
from atoll.errors import ModelError, UsageError
from atoll.exchange import MemoryRun
from atoll.island import Host
from atoll.island.signals import Interrupted
from atoll.jax import Island, join
from atoll.jax.island import OptimizerPart
from atoll.jax.model import JaxModel, JaxView
from atoll.protocol import JoinRequest
from tests.island.scripted import BUFFER, ISLAND, ScriptedRun
from tests.island.windows import WindowRun
from tests.jax.islands import (
    Params,
    moved,
    run_of,
    settings_of,
    together,
    train,
    values,
    weights,
)

pytestmark = pytest.mark.jax


def test_two_islands_take_the_mean() -> None:
    """Both hold the mean of what they have learnt, and one digest."""
    run = run_of(2, every=2, run={"end_rounds": 1})

    def live(name: str, slope: float) -> tuple[list[float], str]:
        with join(weights(4.0, 8.0), run=run, island=name) as island:
            train(island, steps=2, slope=slope)
        return values(island.params), island.digest

    (north, digest), (south, same) = together(
        lambda: live("north", 1.0), lambda: live("south", 3.0)
    )

    # 4 - 2 and 4 - 6: the mean is 0; 8 - 2 and 8 - 6: it is 4.
    assert north == south == [0.0, 4.0]
    assert digest == same


def test_an_island_with_a_shorter_window_makes_fewer_inner_steps() -> None:
    """Rosters give the south 2 of 4 inner steps: both synchronise in one rhythm."""
    run = run_of(
        2, every=4, run={"end_rounds": 2}, sync={"dynamic_local_updates": True}
    )

    def live(name: str, steps: int) -> tuple[list[float], str, int]:
        windows = WindowRun(run, lambda island, _: 2 if island == "south" else 0)
        model = JaxModel.of(weights(0.0))
        view = JaxView(model, weights(0.0))
        host = Host(windows, view, JoinRequest(model=model.spec, island=name))
        island: Island[Params] = Island(
            host, view, OptimizerPart(None, is_kept=False), on_end="flag"
        )
        with island:
            train(island, steps=steps)
        return values(island.params), island.digest, island.round

    north, south = together(lambda: live("north", 8), lambda: live("south", 6))

    # Round 1: both made 4 steps of -1. Round 2: the mean of -4 and of -2 is -3.
    assert north == south
    assert north[0] == [-7.0]
    assert north[2] == 2


def test_an_asynchronous_island_takes_rounds_until_one_has_its_update() -> None:
    """Round 1 passes before round 2 counts it; two inner steps were made meanwhile."""
    sync = {"mode": "async", "sync_every": 4, "overlap_steps": 2}
    exchange = ScriptedRun(settings_of(sync=sync, every=4), iter(["missed"]))
    model = JaxModel.of(weights(0.0))
    view = JaxView(model, weights(0.0))
    host = Host(exchange, view, JoinRequest(model=model.spec, island=ISLAND))
    island: Island[Params] = Island(
        host, view, OptimizerPart(None, is_kept=False), on_end="flag"
    )
    params = train(island, steps=6)

    assert island.round == 2
    assert values(params) == [-4.0 / BUFFER - 2.0]
    host.leave(depart=False)


def test_a_run_in_a_bucket_is_joined_by_its_path(tmp_path: Path) -> None:
    """No server is needed, and the founder's weights are the run's."""
    url = str(tmp_path / "bucket")
    atoll.init(url, settings_of(1, every=2, run={"end_rounds": 2}))

    with join(weights(4.0), run=url, island="north") as island:
        train(island, steps=4)

    assert island.round == 2
    assert values(island.params) == [0.0]


def test_a_later_island_begins_with_the_runs_weights() -> None:
    """What it brought is replaced, in its own dtypes and shardings."""
    run = run_of()
    with join(weights(4.0), run=run, island="north"):
        later = join(weights(9.0), run=run, island="south")
        assert values(later.params) == [4.0]
        later.leave()


def test_a_loop_that_ignores_the_runs_weights_is_refused() -> None:
    """Training what is not the run's would be averaged in silence."""
    own = weights(4.0)
    with (
        pytest.raises(UsageError, match=r"Begin it with params = island\.params"),
        join(own, run=run_of()) as island,
    ):
        island.stepped(own)


def test_a_step_that_synchronises_nothing_returns_the_same_arrays() -> None:
    """No array is copied, looked at or waited for."""
    with join(weights(4.0), run=run_of(every=100)) as island:
        given = moved(island.params, 1.0)
        assert island.stepped(given) is given
        given = moved(given, 1.0)
        assert island.stepped(given) is given


def test_a_step_that_synchronises_nothing_waits_for_no_device() -> None:
    """It looks at no array: those that have no values any more are not noticed."""
    with join(weights(4.0), run=run_of(every=1000)) as island:
        params = island.stepped(moved(island.params, 1.0))
        gone = moved(params, 1.0)
        gone["w"].delete()
        island.report(tokens=1, loss=gone["w"])
        assert island.stepped(gone) is gone
        island.stepped(params)


def test_donated_parameters_are_named() -> None:
    """An island that was given what was deleted says so, and which array."""
    donating = jax.jit(lambda p: moved(p, 1.0), donate_argnums=0)
    with join(weights(4.0), run=run_of()) as island:
        params = island.params
        donating(params)
        with pytest.raises(UsageError, match=r"'w' was deleted: it was donated"):
            island.stepped(params)


def test_parameters_that_are_donated_before_leaving_are_named() -> None:
    """A loop that ends between a train step and `stepped` is told which array it is."""
    donating = jax.jit(lambda p: moved(p, 1.0), donate_argnums=0)
    with (
        pytest.raises(UsageError, match=r"'w' was deleted: it was donated"),
        join(weights(4.0), run=run_of(every=100)) as island,
    ):
        donating(train(island, steps=1))


def test_a_loop_that_donates_is_not_disturbed() -> None:
    """What a sync has read can be donated: nothing keeps a hold on it."""
    donating = jax.jit(lambda p: moved(p, 1.0), donate_argnums=0)
    with join(weights(8.0), run=run_of(every=2, sync={"overlap_steps": 1})) as island:
        params = island.params
        for _ in range(5):
            trained = donating(params)
            assert params["w"].is_deleted()
            params = island.stepped(trained)

    assert values(params) == [3.0]


def test_an_island_inside_jit_says_so() -> None:
    """Nothing can be sent while a function is being traced."""
    with join(weights(4.0), run=run_of()) as island:
        island.params  # noqa: B018
        with pytest.raises(UsageError, match=r"'w' is being traced"):
            jax.jit(island.stepped)(weights(1.0))


def test_another_tree_is_refused() -> None:
    """Shapes, dtypes and structure are those of joining."""
    with join(weights(4.0), run=run_of()) as island:
        island.params  # noqa: B018
        with pytest.raises(ModelError, match=r"The tree is .* now, and was"):
            island.stepped({"v": jnp.zeros(1)})
        with pytest.raises(ModelError, match=r"float16 of shape \(1,\) now"):
            island.stepped(weights(4.0, dtype=jnp.float16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_parameters_keep_their_dtype(dtype: Any) -> None:
    """The anchor is fp32, and what is loaded of it is cast."""
    with join(weights(1.0, dtype=dtype), run=run_of(outer={"lr": 0.5})) as island:
        params = train(island, slope=0.5)

        # From 1 half a step of 0.5 down.
        assert params["w"].dtype == dtype
        assert values(params) == [0.75]
        assert island.anchor()["w"].dtype == np.float32


def test_paths_are_names() -> None:
    """Dicts, lists and attributes are joined by dots, as torch does."""
    params = {"layers": [{"w": jnp.zeros(2)}, {"w": jnp.zeros(3)}], "b": jnp.zeros(1)}
    with join(params, run=run_of()) as island:
        assert list(island.anchor()) == ["b", "layers.0.w", "layers.1.w"]


def test_names_give_the_runs_names_in_the_runs_order() -> None:
    """A key that ends in a dot stands for all below it; the rest follows."""
    params = {"a": jnp.zeros(1), "h": {"k": jnp.zeros(2), "b": jnp.zeros(3)}}
    names = {"h.k": "net.weight", "h.": "net."}
    with join(params, run=run_of(), names=names) as island:
        assert list(island.anchor()) == ["net.weight", "net.b", "a"]

    with join(params, run=run_of(), names=["h.k", "a", "h.b"]) as island:
        assert list(island.anchor()) == ["h.k", "a", "h.b"]


def test_an_ordered_dict_has_an_order_of_its_own() -> None:
    """So the state of a torch module can be given as it is."""
    params = OrderedDict([("weight", jnp.zeros(2)), ("bias", jnp.zeros(1))])
    with join(params, run=run_of()) as island:
        assert list(island.anchor()) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"names": {"v": "x"}}, r"names= has 'v', and the tree has no such leaf"),
        ({"names": {"w": "b"}}, r"'w' and 'b' are both called 'b'"),
        ({"frozen": ["v."]}, r"frozen= has 'v\.', and the tree has no such leaf"),
        ({"frozen": "w"}, r"Write frozen=\['w'\]"),
        ({"frozen": ["b", "w"]}, r"there is nothing to train"),
        ({"frozen": ["w"], "buffers": ["w"]}, r"is in frozen= and in buffers="),
        ({"on_end": "stop"}, r"on_end='stop' is not one of"),
        ({"checkpoint": 3, "optimizer": ()}, r"is neither a directory nor"),
        ({"checkpoint": "d"}, r"keeps the optimizer, and none was given"),
    ],
)
def test_what_is_impossible_is_said(given: dict[str, Any], match: str) -> None:
    """An argument that makes no sense is refused before anything is joined."""
    with pytest.raises(UsageError, match=match):
        join({"b": jnp.zeros(1), "w": jnp.zeros(1)}, run=run_of(), **given)


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        (jnp.tanh, r"'f' is of the type .*, and only arrays"),
        (1.0, r"'f' is of the type float, and only arrays"),
        (np.zeros(1), r"'f' has dtype float64, and only float32"),
        (jnp.zeros(1, jnp.complex64), r"'f' has dtype complex64"),
    ],
)
def test_leaves_that_cannot_be_trained_are_named(leaf: Any, match: str) -> None:
    """The message has the path, and what can be done."""
    with pytest.raises((UsageError, ModelError), match=match):
        join({"f": leaf, "w": jnp.zeros(1)}, run=run_of())


def test_two_leaves_of_one_name_are_refused() -> None:
    """A dot in a key can make two paths one."""
    params = {"a.b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}
    with pytest.raises(UsageError, match=r"Two leaves of the tree are called 'a\.b'"):
        join(params, run=run_of())


def test_frozen_leaves_are_compared_and_not_sent() -> None:
    """Another value is refused by name; the same one stays as it is."""
    run = run_of(2)
    base = {"base": jnp.ones(3), "w": jnp.zeros(1)}
    with join(base, run=run, frozen=["base"]) as island:
        assert list(island.anchor()) == ["w"]
        with pytest.raises(ModelError, match=r"'base' is a constant of shape 3"):
            join({**base, "base": jnp.zeros(3)}, run=run, frozen=["base"])


def test_a_founder_brings_its_constants() -> None:
    """What is never trained is kept by the run, for whoever builds the model."""
    run = run_of()
    base = np.array([1.0, 2.0, 3.0], np.float32)
    with join({"base": jnp.asarray(base), "w": jnp.zeros(1)}, run=run, frozen=["base"]):
        (kept,) = run.constants.values()

    assert bytes(kept) == base.tobytes()


def test_integers_are_constants_and_counters_are_each_ones_own() -> None:
    """A table must be the same everywhere; a counter and a random key need not."""
    run = run_of()
    params = {
        "count": jnp.asarray(3),
        "key": jax.random.key(0),
        "table": jnp.arange(4),
        "w": jnp.zeros(1),
    }
    other = {**params, "count": jnp.asarray(9), "key": jax.random.key(1)}
    with join(params, run=run, island="north"):
        later = join(other, run=run, island="south")
        assert int(later.params["count"]) == 9
        later.leave()
        with pytest.raises(ModelError, match=r"'table' is a constant"):
            join({**other, "table": jnp.zeros(4, jnp.int32)}, run=run)


def test_buffers_are_averaged_as_they_are() -> None:
    """Statistics of two islands become their mean, whatever the outer optimizer is."""
    outer = {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5}
    run = run_of(2, run={"end_rounds": 1}, outer=outer)

    def live(name: str, mean: float) -> Params:
        params = {"stats": {"mean": jnp.zeros(1)}, "w": jnp.zeros(1)}
        with join(params, run=run, island=name, buffers=["stats."]) as island:
            params = island.params
            island.stepped({**params, "stats": {"mean": jnp.array([mean])}})
        return island.params

    first, second = together(lambda: live("a", 2.0), lambda: live("b", 4.0))

    assert values(first["stats"], "mean") == values(second["stats"], "mean") == [3.0]


def test_evaluating_gives_the_anchor_and_leaves_the_loop_alone() -> None:
    """The anchor of the last round, in a tree like the loop's."""
    with join(weights(8.0, dtype=jnp.bfloat16), run=run_of(every=2)) as island:
        params = train(island, steps=3)
        with island.evaluating() as at:
            # Two steps down were agreed; the third is the loop's own.
            assert at.round == 1
            assert values(at.params) == [6.0]
            assert at.params["w"].dtype == jnp.bfloat16
            with pytest.raises(UsageError, match=r"Leave the evaluating\(\) block"):
                island.stepped(params)
        assert values(island.params) == [5.0]


def test_sync_now_returns_what_was_adopted() -> None:
    """Work between two rounds is agreed at once."""
    with join(weights(8.0), run=run_of(every=100)) as island:
        params = island.sync_now(train(island, steps=3))

        assert values(params) == [5.0]
        assert island.round == 1


def test_a_flag_ends_the_loop() -> None:
    """Nothing is raised; the last parameters are those that stepped returned."""
    run = run_of(run={"end_rounds": 1})
    with join(weights(8.0), run=run, on_end="flag") as island:
        params = island.params
        while not island.should_stop:
            params = island.stepped(moved(params, 1.0))

    assert island.ended
    assert values(params) == [7.0]


def test_work_that_has_not_counted_departs() -> None:
    """Leaving gives away what was made since the last round."""
    run = run_of(every=100)
    with join(weights(8.0), run=run) as island:
        train(island, steps=3)

    assert values(join(weights(0.0), run=run, island="other").params) == [5.0]


def test_reports_are_metrics() -> None:
    """What the loop says is what loggers read, beside what the island counts."""
    with join(weights(8.0), run=run_of()) as island:
        island.report(tokens=32, loss=jnp.asarray(2.5), accuracy=0.5)
        island.stepped(moved(island.params, 1.0))
        found = island.metrics()
        with pytest.raises(UsageError, match=r"Use batch\.size"):
            island.report(tokens=jnp.asarray(3))  # type: ignore[arg-type]

    assert found["atoll/loss"] == 2.5
    assert found["atoll/accuracy"] == 0.5
    assert found["atoll/tokens"] == 32
    assert found["atoll/round"] == 1


def test_equal_losses_tell_of_equal_rows() -> None:
    """Islands that began with the same rows can be warned of."""
    told = []
    for _ in range(2):
        with join(weights(8.0), run=run_of()) as island:
            for loss in (0.5, 0.25, 0.125):
                island.report(tokens=4, loss=jnp.asarray(loss))
            told.append(island._host.counters.stats(1.0).first_batch)

    assert told[0] is not None
    assert told[0] == told[1]


def test_an_island_without_a_run_trains_alone() -> None:
    """The word none is said, so that nothing is forgotten."""
    with join(weights(8.0), run="none") as island:
        assert values(train(island, steps=2)) == [6.0]


def test_an_error_loses_only_what_was_not_sealed() -> None:
    """Work before an error may be what caused it."""
    run = run_of(every=2)

    def fail(island: Island[Params]) -> None:
        train(island, steps=3)
        raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        join(weights(8.0), run=run, island="north") as island,
    ):
        fail(island)

    with join(weights(0.0), run=run, island="south") as later:
        assert values(later.params) == [6.0]


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
def test_an_interrupted_step_may_have_taken_its_arrays(
    error: type[BaseException],
) -> None:
    """Then the island leaves without the work that nobody can read any more."""
    run = run_of(every=2)
    donating = jax.jit(lambda p: moved(p, 1.0), donate_argnums=0)

    def interrupted(island: Island[Params]) -> None:
        donating(train(island, steps=3))
        raise error

    is_ours = error is Interrupted
    with (
        nullcontext() if is_ours else pytest.raises(error),
        join(weights(8.0), run=run, island="north") as island,
    ):
        interrupted(island)

    with join(weights(0.0), run=run, island="south") as later:
        assert values(later.params) == [6.0]


def test_the_settings_are_the_runs() -> None:
    """An island has none of its own, and its seed is its own."""
    run = MemoryRun(RunSettings())
    with join(weights(8.0), run=run, island="north") as island:
        assert island.settings == run.settings
        assert island.name == "north"
        assert island.slot == 0
        assert island.place == (0, 1)
        other = join(weights(8.0), run=run, island="south")
        assert other.seed != island.seed
        other.leave()
