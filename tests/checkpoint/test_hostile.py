"""Checkpoints that an attacker wrote: only their digests are right."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

import atoll.checkpoint
from atoll.checkpoint.manifest import MANIFEST
from atoll.errors import AtollError

_TREE = "trainer-00000.json"
_ARRAYS = "trainer-00000.safetensors"


class _Anything:
    """Takes any state."""

    def state_dict(self) -> dict[object, object]:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        return {"a": array, 3: (1.5, None, b"x"), "nan": float("nan"), "s": np.int8(3)}

    def load_state_dict(self, state: object, /) -> None:
        pass


def _saved(root: Path) -> Path:
    return atoll.checkpoint.save(root, {"trainer": _Anything()}, components=["trainer"])


def _forge(path: Path, name: str, data: bytes) -> None:
    """Replace a file, and have the manifest vouch for the new one."""
    (path / name).write_bytes(data)
    body = json.loads((path / MANIFEST).read_text())
    entry = {"size_bytes": len(data), "digest": blake3(data).hexdigest()}
    body["files"][name] = entry
    body.pop("digest")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["digest"] = blake3(text.encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps(body))


def _load(root: Path) -> None:
    """Load it, or fail in a way that is ours."""
    with suppress(AtollError):
        atoll.checkpoint.load(root, {"trainer": _Anything()}, components=["trainer"])


_TAGS = [
    "!dict",
    "!tuple",
    "!float",
    "!ordered",
    "!counter",
    "!bytes",
    "!bytearray",
    "!numpy",
    "!scalar",
    "!x",
    "plain",
]
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["a", "s"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(_TAGS), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(_JSON)
@settings(max_examples=100)
def test_no_tree_does_anything_but_load_or_fail(tree: object) -> None:
    """Reading any tree gives a value or a CorruptError."""
    with tempfile.TemporaryDirectory() as folder:
        path = _saved(Path(folder))
        _forge(path, _TREE, json.dumps({"tree": tree}).encode())
        _load(Path(folder))


@given(st.data())
@settings(max_examples=100)
def test_no_file_of_arrays_does_anything_but_load_or_fail(data: st.DataObject) -> None:
    """Bytes that are flipped, cut off or added are a state, or corrupt."""
    with tempfile.TemporaryDirectory() as folder:
        path = _saved(Path(folder))
        held = bytearray((path / _ARRAYS).read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(held) - 1))
            held[at] = data.draw(st.integers(0, 255))
        end = data.draw(st.integers(0, len(held)) | st.just(len(held)))
        _forge(path, _ARRAYS, bytes(held[:end]) + data.draw(st.binary(max_size=4)))
        _load(Path(folder))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"tree": 1, "more": 2}',
        b'{"tree": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"tree": ' + b"9" * 10_000 + b"}",
        b'{"tree": NaN}',
        b'{"tree": {"a": 1, "a": 2}}',
        b'{"tree": "\xff"}',
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_tree_that_is_no_tree_is_corrupt(tmp_path: Path, text: bytes) -> None:
    """Depth, length and kind of the JSON are refused before anything is made of it."""
    _forge(_saved(tmp_path), _TREE, text)

    with pytest.raises(AtollError):
        atoll.checkpoint.load(
            tmp_path, {"trainer": _Anything()}, components=["trainer"]
        )
