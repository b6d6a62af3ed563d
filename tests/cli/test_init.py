"""`atoll serve --init`: any safetensors file with the model's weights founds a run."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from atoll import RunSettings
from atoll.cli.serve import serve_run
from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.errors import ModelError, UsageError
from atoll.exchange import CoordinatorExchange
from atoll.island import join_run
from atoll.protocol import JoinReply, JoinRequest, ModelSpec, TensorSpec
from atoll.testing import VectorView
from atoll.wire import blake3_digest
from tests.cli.runs import RUN_FILE, as_user, atoll, run
from tests.cli.runs import serving as serving_apart
from tests.coordinator.serving import line_to

SETTINGS = RunSettings.from_dict(
    {
        "run": {"name": "given", "end_rounds": 2},
        "sync": {"sync_every": 2, "num_fragments": 2},
    }
)
SHAPES = {"z.w": (300, 3), "h.0.w": (5, 7), "h.1.w": (11,), "a.scale": ()}
"""In the model's own order, which no sorting by name or size would give."""

MODEL = ModelSpec(
    (
        *(
            TensorSpec(name=name, shape=shape, dtype="float32", role="parameter")
            for name, shape in SHAPES.items()
        ),
        TensorSpec(
            name="mask",
            shape=(8,),
            dtype="int64",
            role="constant",
            digest=blake3_digest(bytes(64)).hex(),
        ),
    )
)
Said = pytest.CaptureFixture[str]


def weights() -> dict[str, np.ndarray]:
    noise = np.random.default_rng(7)
    return {
        name: np.asarray(noise.normal(size=shape), np.float32)
        for name, shape in SHAPES.items()
    }


def saved(path: Path, **others: np.ndarray) -> Path:
    """Write the weights, and what a checkpoint may hold besides."""
    save_file(
        weights() | {key.replace("__", "."): v for key, v in others.items()}, path
    )
    return path


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, tmp_path / "home")


@contextmanager
def served(place: Path, init: Path | None = None) -> Iterator[Coordinator]:
    """Serve the run of a directory in this process while the block lasts."""
    with serve_run(
        place / "run", SETTINGS, ListenOptions(), init=init, has_tensorboard=False
    ) as it:
        yield it.coordinator


def start_of(url: str, island: str) -> dict[str, np.ndarray]:
    """Join, and return the weights that the island starts from; its own are zeros."""
    view = VectorView()
    host = join_run(url, view, MODEL, island=island)
    starts = {}
    for fragment, local in zip(view.layout, view.local, strict=True):
        for at, tensor in enumerate(fragment.tensors):
            part = local[fragment.offsets[at] : fragment.offsets[at + 1]]
            starts[tensor.name] = part.reshape(tensor.shape).copy()
    host.leave(depart=False)
    return starts


def join(coordinator: Coordinator, model: ModelSpec) -> JoinReply:
    """Join and no more."""
    with line_to(coordinator) as line:
        exchange = CoordinatorExchange(line, key=b"a", nonce=b"1")
        return exchange.join(JoinRequest(model=model, island="a"))


def require_weights(starts: dict[str, np.ndarray]) -> None:
    for name, expected in weights().items():
        assert starts[name].tobytes() == expected.tobytes(), name


def kept(place: Path) -> list[Path]:
    return list((place / "run" / "journal" / "init").glob("*"))


def test_the_first_island_finds_the_weights_of_the_file(
    tmp_path: Path, capsys: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no founder; what its model does not have is told once, by name."""
    file = saved(
        tmp_path / "w.safetensors",
        mask=np.zeros(8, np.int64),
        step=np.zeros(3, np.float64),
        lm__bias=np.zeros(3, np.float32),
    )
    with served(tmp_path, file) as coordinator:
        assert "waits for its first island" in capsys.readouterr().err
        assert len(kept(tmp_path)) == 1
        file.unlink()  # nobody needs it any more
        require_weights(start_of(coordinator.url, "a"))
        require_weights(start_of(coordinator.url, "b"))
        told = [each for each in coordinator.events.after(0)]
        assert [e.fields["island"] for e in told if e.name == "run_founded"] == [""]

    assert kept(tmp_path) == []
    said = [each.getMessage() for each in caplog.records]
    (line,) = [each for each in said if "are not used" in each]
    assert line.startswith("2 tensors of the file that `atoll serve --init` was given")
    assert line.endswith("the model does not have them: lm.bias, step")


def test_weights_that_do_not_fit_are_told_to_the_island_and_wait(
    tmp_path: Path,
) -> None:
    """The tensor and both sides are named; the run is served on, for a better model."""
    with served(tmp_path, saved(tmp_path / "w.safetensors")) as coordinator:
        for change, message in (
            ({"name": "h.9.w"}, "'h.9.w' is a .* absent from the file that"),
            ({"shape": (7, 5)}, "shape 7x5 .*float32 in the model, and of shape 5x7"),
            ({"dtype": "bfloat16"}, "dtype bfloat16 in the model, .*dtype float32 in"),
        ):
            first, second, *rest = MODEL.tensors
            other = replace(second, **change)
            model = ModelSpec((first, other, *rest))
            with pytest.raises(ModelError, match=message):
                join(coordinator, model)
            status = coordinator.status()
            assert (status["state"], status["islands"]) == ("founding", [])
        assert len(kept(tmp_path)) == 1
        require_weights(start_of(coordinator.url, "a"))


def test_a_value_that_is_not_finite_founds_nothing(tmp_path: Path) -> None:
    """Its tensor is named, and another file takes the place of the first."""
    bad = tmp_path / "bad.safetensors"
    save_file(weights() | {"h.1.w": np.full(11, np.nan, np.float32)}, bad)
    with (
        served(tmp_path, bad) as coordinator,
        pytest.raises(UsageError, match=r"'h\.1\.w' holds nan in the file that"),
    ):
        join(coordinator, MODEL)
    with served(tmp_path, saved(tmp_path / "w.safetensors")) as coordinator:
        require_weights(start_of(coordinator.url, "a"))


def test_the_file_waits_through_restarts(tmp_path: Path, capsys: Said) -> None:
    """Without --init too, which says what waits; founded, nothing is said any more."""
    saved(tmp_path / "w.safetensors").rename(tmp_path / "moved")
    with served(tmp_path, tmp_path / "moved"):
        pass
    (tmp_path / "moved").unlink()
    capsys.readouterr()
    with served(tmp_path) as coordinator:
        err = capsys.readouterr().err
        require_weights(start_of(coordinator.url, "a"))
    with served(tmp_path) as coordinator:
        require_weights(start_of(coordinator.url, "b"))

    assert "is then founded with the file that `atoll serve --init` was given" in err
    assert str(tmp_path / "run" / "journal" / "init" / "1") in err
    assert capsys.readouterr().err == ""


def test_a_process_that_is_killed_has_its_file_still(tmp_path: Path) -> None:
    """SIGKILL before the first island; the next start is without --init."""
    file = saved(tmp_path / "w.safetensors")
    with serving_apart(tmp_path, "--init", file) as first:
        assert first.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    file.unlink()
    with serving_apart(tmp_path) as second:
        code, out, _ = atoll("status", second.url, "--json", home=second.home)
        assert (code, json.loads(out)["state"]) == (0, "founding")
        code, complaints = second.stop()

    assert code == 0
    assert "waits for its first island" in complaints


@pytest.mark.parametrize(
    ("data", "expected", "message"),
    [
        (None, 2, "cannot be read: No such file"),
        (b"", 5, "its header would have 0 bytes"),
        (b"\xff" * 20, 5, "its header would have 18446744073709551615 bytes"),
        (b"\x02" + bytes(7) + b"[]", 5, "its header is no table of at most"),
        (b"\x07" + bytes(7) + b'{"w":3}', 5, "is no safetensors file"),
        ("torn", 5, "and its header says"),
    ],
)
def test_a_file_that_is_none_changes_nothing(
    data: bytes | str | None, expected: int, message: str, tmp_path: Path, capsys: Said
) -> None:
    """Exit codes 2 and 5, before there is a run."""
    file = tmp_path / "w.safetensors"
    if data == "torn":
        save_file({"z.w": np.ones(3, np.float32)}, file)
        file.write_bytes(file.read_bytes()[:-1])
    elif isinstance(data, bytes):
        file.write_bytes(data)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    options = ("--dir", tmp_path / "run", "--init", file)
    code, _, err = run(capsys, "serve", tmp_path / "run.toml", *options)

    assert code == expected
    assert message in err
    assert not (tmp_path / "run" / "journal").exists()


def test_a_file_of_an_export_that_cannot_found_is_not_kept(
    tmp_path: Path, capsys: Said
) -> None:
    """The command fails with the reason; the next one, without it, serves the run."""
    file = tmp_path / "w.safetensors"
    rows = [[f"h.{n}.w", [4], "float32", "parameter", ""] for n in range(2)]
    short = {row[0]: np.ones(3, np.float32) for row in rows}
    save_file(short, file, metadata={"atoll.model": json.dumps(rows)})  # type: ignore[arg-type] # names
    with pytest.raises(ModelError, match=r"of shape 4 .* and of shape 3"):
        served(tmp_path, file).__enter__()
    with served(tmp_path) as coordinator:
        assert coordinator.status()["state"] == "founding"

    assert capsys.readouterr().err == ""
    assert kept(tmp_path) == []
