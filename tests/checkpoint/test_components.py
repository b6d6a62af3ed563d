"""A checkpoint holds the chosen components, and is marked if it has no weights."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import atoll.checkpoint
from atoll.checkpoint import COMPONENTS, Policy
from atoll.errors import UsageError
from tests.checkpoint.objects import Weights


def test_the_components_are_those_that_were_promised() -> None:
    """Their names are a promise to users."""
    assert COMPONENTS == (
        "model",
        "optimizer",
        "scheduler",
        "trainer",
        "data",
        "rng",
        "island",
    )


def _everything() -> dict[str, object]:
    return {name: Weights(1.0) for name in COMPONENTS}


def test_none_means_all(tmp_path: Path) -> None:
    """Without a choice everything is saved, and everything is restored."""
    atoll.checkpoint.save(tmp_path, _everything())
    objects = {name: Weights() for name in COMPONENTS}

    loaded = atoll.checkpoint.load(tmp_path, objects)

    assert loaded is not None
    assert loaded.restored == COMPONENTS
    assert {name: each.value for name, each in objects.items()} == dict.fromkeys(
        COMPONENTS, 1.0
    )


@pytest.mark.parametrize(
    "chosen", [["optimizer"], ["model", "rng"], ["island", "data"]]
)
def test_any_subset_is_saved(tmp_path: Path, chosen: list[str]) -> None:
    """The files are those of the chosen components, and no others."""
    path = atoll.checkpoint.save(tmp_path, _everything(), components=chosen)

    names = {file.name.partition("-")[0] for file in path.iterdir()}
    assert names == {*chosen, "manifest.json"}


@pytest.mark.parametrize("chosen", [["scheduler"], ["model", "trainer"]])
def test_any_subset_is_loaded(tmp_path: Path, chosen: list[str]) -> None:
    """A component that was not chosen keeps its present state."""
    atoll.checkpoint.save(tmp_path, _everything())
    objects = {name: Weights() for name in COMPONENTS}

    loaded = atoll.checkpoint.load(tmp_path, objects, components=chosen)

    assert loaded is not None
    assert loaded.restored == tuple(chosen)
    assert {name for name, each in objects.items() if each.value == 1.0} == set(chosen)


def test_a_misspelt_component_is_refused_with_the_known_names(tmp_path: Path) -> None:
    """A typo of "model" must not make a checkpoint without weights."""
    with pytest.raises(UsageError) as caught:
        atoll.checkpoint.save(tmp_path, _everything(), components=["modle"])

    assert str(caught.value) == (
        "'modle' is no component of a checkpoint. Did you mean 'model'? Known are "
        "model, optimizer, scheduler, trainer, data, rng, island."
    )
    assert list(tmp_path.iterdir()) == []


def _late(root: Path) -> None:
    with atoll.checkpoint.Saver(root, {"model": Weights()}) as saver:
        saver.save(late=["optimiser"])


_DOORS: dict[str, Callable[[Path], object]] = {
    "load": lambda root: atoll.checkpoint.load(root, {}, components=["optimiser"]),
    "objects": lambda root: atoll.checkpoint.save(root, {"optimiser": Weights()}),
    "extra": lambda root: Policy(root, extra={"optimiser": Weights()}),
    "policy": lambda root: Policy(root, components=["optimiser"]),
    "late": _late,
}


@pytest.mark.parametrize("door", _DOORS)
def test_a_misspelt_component_is_refused_everywhere(tmp_path: Path, door: str) -> None:
    """Every door for a name checks it, before anything else is done."""
    with pytest.raises(UsageError, match=r"'optimiser'.*Did you mean 'optimizer'"):
        _DOORS[door](tmp_path)


def test_one_word_is_not_a_list_of_letters(tmp_path: Path) -> None:
    """components="model" is reported as a string, not as five unknown components."""
    with pytest.raises(UsageError, match=r"Write components=\['model'\]"):
        atoll.checkpoint.save(tmp_path, _everything(), components="model")


def test_a_known_component_that_is_not_produced_is_ignored(tmp_path: Path) -> None:
    """A chosen scheduler that was not given is left out of the checkpoint."""
    atoll.checkpoint.save(
        tmp_path, {"model": Weights()}, components=["model", "scheduler"]
    )

    checkpoint = atoll.checkpoint.newest(tmp_path)

    assert checkpoint is not None
    assert checkpoint.components == ("model",)


def test_what_a_checkpoint_does_not_hold_is_told_as_fresh(tmp_path: Path) -> None:
    """An optimizer that was not saved keeps its new state, and is listed as fresh."""
    atoll.checkpoint.save(tmp_path, {"model": Weights()})

    loaded = atoll.checkpoint.load(
        tmp_path, {"model": Weights(), "optimizer": Weights()}
    )

    assert loaded is not None
    assert loaded.fresh == ("optimizer",)


def test_leaving_out_the_model_marks_the_weights_as_external(tmp_path: Path) -> None:
    """A checkpoint without weights is valid because it is marked as such."""
    chosen = [name for name in COMPONENTS if name != "model"]
    atoll.checkpoint.save(tmp_path, _everything(), components=chosen)

    checkpoint = atoll.checkpoint.newest(tmp_path)

    assert checkpoint is not None
    assert checkpoint.weights == "external"
    assert checkpoint.components == tuple(chosen)


def test_weights_are_not_asked_of_a_checkpoint_without_them(tmp_path: Path) -> None:
    """A model that would keep its random beginning is refused."""
    atoll.checkpoint.save(tmp_path, _everything(), components=["optimizer"])

    with pytest.raises(
        UsageError, match=r"has no weights: they are marked as external"
    ):
        atoll.checkpoint.load(tmp_path, _everything())


def test_saving_no_model_by_accident_is_refused(tmp_path: Path) -> None:
    """Only who leaves the model out by name gets a checkpoint without weights."""
    with pytest.raises(UsageError, match=r"No model was given.*leave 'model' out"):
        atoll.checkpoint.save(tmp_path, {"optimizer": Weights()})


def test_random_states_come_by_themselves(tmp_path: Path) -> None:
    """Python and numpy draw the same numbers as without the restart."""
    mine = random.Random(3)
    generator = np.random.default_rng(4)
    given = {"mine": mine, "numpy": generator, "old": np.random.RandomState(5)}
    atoll.checkpoint.save(tmp_path, {"rng": given}, components=["rng"])
    expected = [random.random(), np.random.rand(), mine.random(), generator.random()]

    mine, generator, old = (
        random.Random(),
        np.random.default_rng(),
        np.random.RandomState(),
    )
    again = {"mine": mine, "numpy": generator, "old": old}
    atoll.checkpoint.load(tmp_path, {"rng": again}, components=["rng"])

    drawn = [random.random(), np.random.rand(), mine.random(), generator.random()]
    assert drawn == expected
    assert old.random() == np.random.RandomState(5).random()


def test_a_component_may_be_several_objects_and_values(tmp_path: Path) -> None:
    """Two optimizers and a trainer's counters are restored each in its place."""
    objects = {
        "optimizer": [Weights(1.0), {"muon": Weights(2.0)}],
        "trainer": {"epoch": 3, "best": [0.5], "ema": Weights(4.0)},
        "data": [1, 2],
    }
    chosen = list(objects)
    atoll.checkpoint.save(tmp_path, objects, components=chosen)
    first, second, average = Weights(), Weights(), Weights()
    trainer: dict[str, object] = {"epoch": 0, "best": [], "ema": average}
    data: list[int] = []

    atoll.checkpoint.load(
        tmp_path,
        {"optimizer": [first, {"muon": second}], "trainer": trainer, "data": data},
        components=chosen,
    )

    assert (first.value, second.value, average.value) == (1.0, 2.0, 4.0)
    assert trainer == {"epoch": 3, "best": [0.5], "ema": average}
    assert data == [1, 2]


def test_objects_that_were_not_saved_are_named(tmp_path: Path) -> None:
    """A second optimizer that the checkpoint does not know is refused by its path."""
    atoll.checkpoint.save(
        tmp_path, {"optimizer": {"adam": Weights()}}, components=["optimizer"]
    )

    with pytest.raises(UsageError, match=r"optimizer\.muon is not in the checkpoint"):
        atoll.checkpoint.load(
            tmp_path,
            {"optimizer": {"adam": Weights(), "muon": Weights()}},
            components=["optimizer"],
        )


def test_a_component_without_a_state_is_refused(tmp_path: Path) -> None:
    """A plain iterator has no state; the error names objects that have."""
    with pytest.raises(
        UsageError, match=r"data is of the type range_iterator.*state_dict"
    ):
        atoll.checkpoint.save(tmp_path, {"data": iter(range(3))}, components=["data"])


def test_the_metadata_of_a_checkpoint_comes_back(tmp_path: Path) -> None:
    """A round and a number of steps are kept beside the state."""
    metadata = {"round": 12, "inner_steps": 1200, "loss": 1.5}
    atoll.checkpoint.save(tmp_path, {"model": Weights()}, metadata=metadata)

    loaded = atoll.checkpoint.load(tmp_path, {"model": Weights()})

    assert loaded is not None
    assert loaded.metadata == metadata

    with pytest.raises(UsageError, match=r"metadata=.* must be made of strings"):
        atoll.checkpoint.save(
            tmp_path, {"model": Weights()}, metadata={"x": float("nan")}
        )


def test_importing_loads_no_framework() -> None:
    """Saving arrays of numpy does not import torch."""
    code = (
        "import sys, tempfile, atoll.checkpoint as c\n"
        "d = tempfile.mkdtemp()\n"
        "c.save(d, {'trainer': {'n': 1}}, components=['trainer', 'rng'])\n"
        "print('torch' in sys.modules, c.load(d, {'trainer': {}}).restored)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False ('trainer', 'rng')"


def test_a_policy_says_when_and_what(tmp_path: Path) -> None:
    """It is due every n rounds, has default components, and no component twice."""
    policy = Policy(tmp_path, every_rounds=4, extra={"scheduler": Weights(2.0)})

    assert [n for n in range(12) if policy.is_due(n, None)] == [
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
    ]
    assert [n for n in range(12) if policy.is_due(n, 5)] == [9, 10, 11]
    assert policy.chosen(["island", "optimizer"]) == ("optimizer", "island")
    assert Policy(tmp_path, components=["rng"]).chosen(["model"]) == ("rng",)
    with policy.saver(
        {"optimizer": Weights()}, default=["optimizer", "scheduler"]
    ) as s:
        assert s.components == ("optimizer", "scheduler")
    with pytest.raises(UsageError, match="extra= has scheduler"):
        policy.saver({"scheduler": Weights()})
    with pytest.raises(UsageError, match="every_rounds=0"):
        Policy(tmp_path, every_rounds=0)
