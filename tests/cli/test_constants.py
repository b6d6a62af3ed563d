"""Constants go with a run wherever commands take it: files, stores, coordinators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import atoll
from atoll import RunSettings
from atoll.cli.serve import serve_run
from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.errors import ModelError
from atoll.island import join_run
from atoll.protocol import ModelSpec, TensorSpec
from atoll.testing import VectorView
from tests.cli.runs import as_user, run
from tests.e2e.stage import free_port
from tests.exchange.constant_samples import BASE, SPECS, TABLE, Held

SETTINGS = RunSettings.from_dict(
    {
        "run": {"name": "kept", "end_rounds": 1},
        "sync": {"sync_every": 1, "num_fragments": 2},
    }
)
MODEL = ModelSpec(
    (
        TensorSpec(name="h.0.w", shape=(3, 5), dtype="float32", role="parameter"),
        *SPECS,
        TensorSpec(name="h.1.w", shape=(7,), dtype="float16", role="parameter"),
    )
)
Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, tmp_path / "home")


@contextmanager
def served(
    place: Path, settings: RunSettings | None = SETTINGS, *, init: Path | None = None
) -> Iterator[Coordinator]:
    """Serve the run of a directory in this process while the block lasts."""
    with serve_run(
        place, settings, ListenOptions(), init=init, has_tensorboard=False
    ) as it:
        yield it.coordinator


def train(url: str, *, held: Held | None = None) -> None:
    """Found the run, and train to its end."""
    view = VectorView()
    host = join_run(url, view, MODEL, island="a", constants=held)
    while not host.has_ended:
        for local in view.local:
            local += 1.0
        host.stepped()
    host.leave()


def exported(url: str, out: Path, capsys: Said) -> dict[str, np.ndarray]:
    """Export a run that keeps all its constants, and return what is in the file."""
    code, said, err = run(capsys, "export", url, out, "--json")
    assert code == 0, err
    assert json.loads(said)["constants"] == []
    return load_file(out)


def require_constants(tensors: dict[str, np.ndarray]) -> None:
    assert set(tensors) == {each.name for each in MODEL.tensors}
    assert (tensors["base"].tobytes(), tensors["base"].shape) == (BASE, (4, 3))
    assert tensors["table"].dtype == np.int64
    assert tensors["table"].tobytes() == TABLE


def require_same(tensors: dict[str, np.ndarray], first: dict[str, np.ndarray]) -> None:
    require_constants(tensors)
    for name, values in first.items():
        assert tensors[name].tobytes() == values.tobytes(), name


def test_a_run_takes_its_constants_everywhere(tmp_path: Path, capsys: Said) -> None:
    """Exported, founded anew in a store, moved to a coordinator and back to a store."""
    with served(tmp_path / "run") as coordinator:
        train(coordinator.url, held=Held())
        out = tmp_path / "first.safetensors"
        first = exported(coordinator.url, out, capsys)
    require_constants(first)

    store, file = str(tmp_path / "store"), tmp_path / "run.toml"
    file.write_text('[run]\nname = "next"\n[sync]\nnum_fragments = 2\n')
    assert run(capsys, "init", store, file, "--init", out)[0] == 0
    require_same(exported(store, tmp_path / "store.safetensors", capsys), first)

    directory, target = tmp_path / "there", f"https://127.0.0.1:{free_port()}"
    assert run(capsys, "move", store, target, "--dir", directory)[0] == 0
    with served(directory, None) as coordinator:
        url = coordinator.url
        require_same(exported(url, tmp_path / "moved.safetensors", capsys), first)
        back = str(tmp_path / "back")
        assert run(capsys, "move", url, back)[0] == 0
        require_same(exported(back, tmp_path / "back.safetensors", capsys), first)


def test_a_file_founds_a_run_with_its_constants(tmp_path: Path, capsys: Said) -> None:
    """One that says its order does so at once, any other when an island has joined."""
    with served(tmp_path / "run") as coordinator:
        train(coordinator.url, held=Held())
        out = tmp_path / "first.safetensors"
        first = exported(coordinator.url, out, capsys)
    with served(tmp_path / "ordered", init=out) as coordinator:
        require_same(exported(coordinator.url, tmp_path / "o", capsys), first)
    plain = tmp_path / "plain.safetensors"
    save_file(first, plain)
    with served(tmp_path / "plain", init=plain) as coordinator:
        view = VectorView()
        join_run(coordinator.url, view, MODEL, island="a").leave(depart=False)
        require_same(exported(coordinator.url, tmp_path / "p", capsys), first)


def test_a_file_with_another_base_founds_nothing(tmp_path: Path) -> None:
    """The constant is named, with both digests; the file waits for its own model."""
    weights: dict[str, np.ndarray] = {
        "h.0.w": np.zeros((3, 5), np.float32),
        "h.1.w": np.zeros(7, np.float16),
        "base": np.ones((4, 3), np.float32),
    }
    save_file(weights, tmp_path / "w.safetensors")
    with served(tmp_path / "run", init=tmp_path / "w.safetensors") as coordinator:
        with pytest.raises(
            ModelError, match=r"'base' is a constant .* one with digest"
        ):
            join_run(coordinator.url, VectorView(), MODEL, island="a")
        assert coordinator.status()["state"] == "founding"


def test_constants_that_nobody_brought_are_named(tmp_path: Path, capsys: Said) -> None:
    """A run that was founded without says so at an export; what it has is there."""
    url = str(tmp_path / "store")
    atoll.init(url, SETTINGS)
    train(url)
    out = tmp_path / "out.safetensors"
    code, _, err = run(capsys, "export", url, out)

    assert code == 0
    assert "does not keep them: base, table." in err
    assert set(load_file(out)) == {"h.0.w", "h.1.w", "nothing"}
