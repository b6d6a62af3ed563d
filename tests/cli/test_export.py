"""`atoll export`: the weights as every framework reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from atoll import RunSettings
from atoll.cli.serve import serve_run
from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.island import join_run
from atoll.island.environment import credentials_from_environment
from atoll.island.host import Host
from atoll.protocol import ModelSpec, TensorSpec
from atoll.security import Credentials, Role, token_file
from atoll.testing import Link, VectorView
from tests.cli.runs import as_user, run

SHAPES = [
    ("embed", (70_000, 2), "bfloat16", "parameter"),
    ("h.0.w", (5, 7), "float32", "parameter"),
    ("h.1.w", (11,), "float16", "parameter"),
    ("scale", (), "float32", "parameter"),
    ("mean", (3,), "float32", "buffer"),
    ("mask", (8,), "int64", "constant"),
]
MODEL = ModelSpec(
    tuple(
        TensorSpec(
            name=name,
            shape=shape,
            dtype=dtype,
            role=role,  # type: ignore[arg-type] # a literal of the table above
            digest="aa" if role == "constant" else "",
        )
        for name, shape, dtype, role in SHAPES
    )
)
SETTINGS = RunSettings.from_dict(
    {
        "run": {"name": "export", "end_rounds": 2},
        "sync": {"sync_every": 2, "num_fragments": 2},
    }
)

Said = pytest.CaptureFixture[str]


@contextmanager
def listening_to(
    place: Path, settings: RunSettings, *, init: Path | None = None
) -> Iterator[Coordinator]:
    """Serve a run in this process while the block lasts."""
    with serve_run(
        place, settings, ListenOptions(), init=init, has_tensorboard=False
    ) as served:
        yield served.coordinator


@pytest.fixture
def coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Coordinator]:
    """Return a coordinator of a new run, which this user knows."""
    as_user(monkeypatch, tmp_path / "home")
    with listening_to(tmp_path / "run", SETTINGS) as coordinator:
        yield coordinator


def train(url: str) -> list[dict[str, np.ndarray]]:
    """Train until the run ends; return what an island holds after each round."""
    view, noise = VectorView(), np.random.default_rng(1)
    host = join_run(url, view, MODEL, island="a")
    held = [anchors(view, host)]
    while not host.has_ended:
        for local in view.local:
            local += noise.normal(size=len(local)).astype(np.float32)
        host.stepped()
        if all(slot.state.round == len(held) for slot in host.slots):
            held.append(anchors(view, host))
    host.leave()
    return held


def anchors(view: VectorView, host: Host) -> dict[str, np.ndarray]:
    """Return what an island's anchors are once loaded, by name."""
    return tensors(view, [slot.state.anchor for slot in host.slots])


def tensors(view: VectorView, vectors: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return what vectors of fragments are once loaded, by name."""
    held = {}
    for fragment, vector in zip(view.layout, vectors, strict=True):
        values = np.empty(fragment.elements, np.float32)
        fragment.load(vector, values)
        for at, tensor in enumerate(fragment.tensors):
            part = values[fragment.offsets[at] : fragment.offsets[at + 1]]
            held[tensor.name] = part.reshape(tensor.shape)
    return held


def read(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, list[int]]]]:
    """Return a file's metadata, and dtype and shape of each tensor."""
    with safe_open(path, "np") as file:
        kinds = {
            name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118
        }
        return file.metadata(), kinds


def values_of(path: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a file, as fp32."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    table, found = json.loads(data[8 : 8 + size]), {}
    for name, each in table.items():
        if name != "__metadata__":
            first, last = (8 + size + at for at in each["data_offsets"])
            found[name] = _as_fp32(data[first:last], each["dtype"]).reshape(
                each["shape"]
            )
    return found


def _as_fp32(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        wide = np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    kind = np.float16 if dtype == "F16" else np.float32
    return np.frombuffer(data, kind).astype(np.float32)


def test_every_tensor_is_there_in_its_own_dtype(
    coordinator: Coordinator, tmp_path: Path, capsys: Said
) -> None:
    """Bit for bit what an island's model holds; a constant is named as missing."""
    held = train(coordinator.url)[-1]
    out = tmp_path / "weights.safetensors"
    code, said, err = run(capsys, "export", coordinator.url, out, "--round", "2")
    metadata, kinds = read(out)
    values = values_of(out)

    assert code == 0
    assert said == f"{out}: round 2, 5 tensors, {out.stat().st_size} bytes\n"
    assert "not in the file" in err
    assert "mask" in err
    assert kinds == {
        "embed": ("BF16", [70_000, 2]),
        "h.0.w": ("F32", [5, 7]),
        "h.1.w": ("F16", [11]),
        "scale": ("F32", []),
        "mean": ("F32", [3]),
    }
    assert metadata["atoll.run"] == coordinator.run
    assert metadata["atoll.rounds"] == "[2, 2, 2]"
    rows = json.loads(metadata["atoll.model"])
    assert [row[0] for row in rows] == [each.name for each in MODEL.tensors]
    for name, expected in held.items():
        assert values[name].tobytes() == expected.tobytes(), name


def test_an_export_founds_another_run(
    coordinator: Coordinator, tmp_path: Path, capsys: Said
) -> None:
    """With other settings too; an island then starts from these weights."""
    held = train(coordinator.url)[-1]
    out = tmp_path / "weights.safetensors"
    assert run(capsys, "export", coordinator.url, out)[0] == 0
    settings = SETTINGS.with_values({"sync.num_fragments": 1, "run.name": "next"})
    for _ in range(2):  # the second time it has its weights
        with listening_to(tmp_path / "next", settings, init=out) as second:
            view = VectorView()
            host = join_run(second.url, view, MODEL, island="a")
            starts = tensors(view, view.local)
            host.leave(depart=False)

        for name, expected in held.items():
            assert starts[name].tobytes() == expected.tobytes(), name
    assert "has its weights" in capsys.readouterr().err


def test_a_round_that_is_over_can_be_had_while_it_is_kept(
    coordinator: Coordinator, tmp_path: Path, capsys: Said
) -> None:
    """Bit for bit what the model held then; resumed, asked twice, all the same."""
    held = train(coordinator.url)
    for round in range(3):
        out = tmp_path / f"{round}.safetensors"
        code, said, _ = run(
            capsys, "export", coordinator.url, out, "--round", str(round)
        )
        assert code == 0
        assert said.startswith(f"{out}: round {round}, 5 tensors, ")
        metadata, _ = read(out)
        assert metadata["atoll.rounds"] == str([round] * 3)
        for name, expected in held[round].items():
            assert values_of(out)[name].tobytes() == expected.tobytes(), (round, name)


def test_a_round_that_is_not_kept_is_refused(
    coordinator: Coordinator, tmp_path: Path, capsys: Said
) -> None:
    """Exit code 4 before the first island, and with the rounds that can be had."""
    out = tmp_path / "weights.safetensors"
    for options in ((), ("--round", "0")):
        code, _, err = run(capsys, "export", coordinator.url, out, *options)
        assert code == 4
        assert "The run has no weights yet" in err

    train(coordinator.url)
    code, _, err = run(capsys, "export", coordinator.url, out, "--round", "3")
    assert code == 4
    assert "The anchor of round 3 is not kept. Available: rounds 0 to 2." in err
    assert list(tmp_path.glob("weights*")) == []


def test_a_file_that_breaks_off_goes_on(
    coordinator: Coordinator,
    tmp_path: Path,
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut in its middle, the file is whole, and was on the wire once."""
    train(coordinator.url)
    whole, out = tmp_path / "whole.safetensors", tmp_path / "out.safetensors"
    assert run(capsys, "export", coordinator.url, whole)[0] == 0
    with Link(coordinator.address) as link:
        url = coordinator.url.replace(str(coordinator.address[1]), str(link.address[1]))
        tokens = {role: token_file(coordinator.directory, role) for role in Role}
        surroundings = credentials_from_environment()
        known = Credentials(surroundings.credentials)
        known.remember(url, pin=coordinator.pin, tokens=tokens)
        link.close_after(100_000, direction="down")
        code, _, err = run(capsys, "export", url, out)
    size = whole.stat().st_size

    assert (code, size > 250_000) == (0, True), err
    assert out.read_bytes() == whole.read_bytes()
    # What is encrypted comes in records of 16 KiB, of which one is lost with each
    # connection; a handshake takes a few KB.
    assert size < link.bytes_down < size + 60_000


def test_a_file_is_never_replaced(
    coordinator: Coordinator, tmp_path: Path, capsys: Said
) -> None:
    """What is there stays, and a directory that is not there is named."""
    out = tmp_path / "weights.safetensors"
    out.write_text("mine")
    code, _, err = run(capsys, "export", coordinator.url, out)
    assert (code, out.read_text()) == (2, "mine")
    assert "exists already" in err

    code, _, err = run(capsys, "export", coordinator.url, tmp_path / "no" / "x")
    assert code == 2
    assert "cannot be written: No such file or directory" in err


def test_the_file_is_the_same_for_all_who_ask(
    coordinator: Coordinator, tmp_path: Path, capsys: Said
) -> None:
    """Asked twice it has the same bytes, and an optional JSON says what is in it."""
    train(coordinator.url)
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        code, said, _ = run(capsys, "export", coordinator.url, path, "--json")
        assert code == 0
        assert json.loads(said) == {
            "run": coordinator.run,
            "round": 2,
            "rounds": [2, 2, 2],
            "tensors": 5,
            "bytes": path.stat().st_size,
            "constants": ["mask"],
            "file": str(path),
        }
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.torch
def test_a_model_loads_it_strictly(
    coordinator: Coordinator, tmp_path: Path, capsys: Said
) -> None:
    """Names, shapes and dtypes are the model's own, and the values its anchor's."""
    import torch
    from safetensors.torch import load_file

    import atoll.torch

    def built() -> torch.nn.Module:
        first, last = torch.nn.Linear(6, 5), torch.nn.Linear(5, 2, bias=False)
        middle = torch.nn.LayerNorm(5, dtype=torch.bfloat16)
        return torch.nn.Sequential(first, middle, last)

    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.torch.join(model, optimizer, coordinator.url, island="a") as island:
        while True:
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            island.report(tokens=1)
            optimizer.step()
    out = tmp_path / "weights.safetensors"
    assert run(capsys, "export", coordinator.url, out)[0] == 0
    other = built()
    other.load_state_dict(load_file(out), strict=True)

    anchor = island.anchor()
    assert other.state_dict().keys() == anchor.keys()
    for name, value in other.state_dict().items():
        assert torch.equal(value, anchor[name].to(value.dtype)), name
