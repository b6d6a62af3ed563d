"""300 accidents to checkpoints: the same values, older ones with a report, or an error.

Files are changed one at a time. A checkpoint that is removed as a whole is gone, and
nothing tells of it.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import atoll.checkpoint
from atoll.errors import AtollError, AtollWarning
from tests.attacks.mutations import Files, mutated
from tests.checkpoint.objects import Weights

MUTATIONS = 300
OLDER, NEWER = 1.0, 2.0


class Loop:
    """A training loop with a place and random numbers of its own."""

    def __init__(self, seed: int) -> None:
        self.state = {"seed": seed, "noise": np.random.default_rng(seed).normal(size=9)}

    def state_dict(self) -> dict[str, object]:
        return dict(self.state)

    def load_state_dict(self, state: object, /) -> None:
        assert isinstance(state, dict)
        self.state = state


def save(root: Path, value: float) -> None:
    model = Weights(value, size=3000)
    model.count = int(value)
    objects = {"model": model, "trainer": Loop(int(value))}
    atoll.checkpoint.save(root, objects, components=["model", "trainer"])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return the files of two checkpoints, by their paths."""
    root = tmp_path_factory.mktemp("checkpoints")
    save(root, OLDER)
    save(root, NEWER)
    found = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in found
        if path.parent != root
    }


def renamed(rng: random.Random, name: str) -> str:
    """Return the name of another file that a checkpoint has, or might have."""
    folder = rng.choice([name.partition("/")[0], "checkpoint-00000001"])
    last = rng.choice(
        [
            "manifest.json",
            "model-00000.json",
            "model-00000.safetensors",
            "trainer-00000.json",
            "trainer-00000.safetensors",
            "optimizer-00000.json",
            "model-00001.json",
            "notes.txt",
        ]
    )
    return f"{folder}/{last}"


def became(root: Path) -> str:
    """Return what loading a damaged directory gives, if that is allowed."""
    model, loop = Weights(-1.0), Loop(0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            loaded = atoll.checkpoint.load(root, {"model": model, "trainer": loop})
        except AtollError as exc:
            return "an error" if "checkpoint-0000000" in str(exc) else f"unnamed: {exc}"
    if loaded is None:
        return "nothing, in silence"
    seed = int(model.value)
    noise = np.random.default_rng(seed).normal(size=9)
    is_whole = (
        loaded.restored[:2] == ("model", "trainer")
        and model.count == seed
        and loop.state["seed"] == seed
        and np.array_equal(np.asarray(loop.state["noise"]), noise)
        and len(model.array) == 3000
    )
    if not is_whole or model.value not in (OLDER, NEWER):
        return "something else"
    if model.value == NEWER:
        return "the same"
    is_told = any(each.category is AtollWarning for each in warned)
    return "older, reported" if is_told and loaded.passed_over else "older, in silence"


def test_no_accident_gives_other_values(files: Files, tmp_path: Path) -> None:
    """Whatever happens to a file, no other value comes out, and no loss is silent."""
    rng = random.Random("checkpoints")
    counts: Counter[str] = Counter()
    for number in range(MUTATIONS):
        changed, what = mutated(files, rng, renamed)
        root = tmp_path / f"{number}"
        for name, data in changed.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        result = became(root)
        assert result in ("the same", "older, reported", "an error"), (number, what)
        counts[result] += 1
        shutil.rmtree(root)

    assert counts["the same"] > 30
    assert counts["older, reported"] > 30


def test_two_accidents_are_an_error_that_names_both(
    files: Files, tmp_path: Path
) -> None:
    """With no checkpoint left that verifies, nothing starts afresh in silence."""
    rng = random.Random("both")
    for number in range(30):
        root = tmp_path / f"{number}"
        for name, data in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            first = rng.randrange(len(data))
            path.write_bytes(data[:first] + b"\0\1" + data[first + 2 :])

        with pytest.raises(AtollError, match=r"checkpoint-00000002.*checkpoint-000000"):
            atoll.checkpoint.load(root, {"model": Weights(), "trainer": Loop(0)})
