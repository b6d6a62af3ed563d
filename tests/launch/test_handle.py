"""A launch is found again by a document that anybody may have written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.errors import CorruptError, UsageError
from atoll.launch.base import MAX_HANDLE_BYTES, Handle, LaunchOrder
from atoll.launch.spec import IslandSpec

HANDLE = Handle(
    id="lagoon-slurm-1f",
    engine="slurm",
    run="https://10.0.0.5:4711",
    name="slurm",
    num_islands=3,
    first=2,
    options={"partition": "gpu"},
    reference={"job": 17},
)


def test_a_handle_is_what_was_written() -> None:
    """Nothing of it is lost on the way through a file."""
    assert Handle.from_json(HANDLE.to_json()) == HANDLE
    assert [HANDLE.island(index) for index in HANDLE.indexes] == [
        "slurm-2",
        "slurm-3",
        "slurm-4",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "handle.version=2 must be"),
        ({"id": "A/../b"}, "no id of a launch"),
        ({"num_islands": 0}, "0 islands"),
        ({"num_islands": True}, "handle.num_islands=True must be a whole number"),
        ({"first": -1}, "handle.first=-1 must be a whole number"),
        ({"num_islands": 5000}, "5000 islands"),
        ({"name": "a b"}, "cannot begin the names"),
        ({"engine": None}, "handle.engine=None must be text"),
        ({"reference": []}, "must be a table"),
        ({"begun_at_s": "1"}, "must be a finite number"),
        ({"begun_at_s": float("nan")}, "must be a finite number"),
        ({"begun_at_s": 10**400}, "must be a finite number"),
        ({"options": {"a": 1}}, "handle.options.a=1 must be text"),
    ],
)
def test_a_damaged_handle_is_refused(change: dict[str, Any], message: str) -> None:
    """Whatever a file holds, nothing but a handle is taken for one."""
    said = json.dumps(json.loads(HANDLE.to_json()) | change)
    with pytest.raises(CorruptError, match=message):
        Handle.from_json(said)


@pytest.mark.parametrize("said", ["", "[]", "{}", "[" * 10_000, '{"version": 1}'])
def test_what_is_no_handle_is_refused(said: str) -> None:
    """Damage is told as damage, never as an error of a parser."""
    with pytest.raises(CorruptError, match="no handle"):
        Handle.from_json(said)


def test_a_handle_is_bounded() -> None:
    """Neither a file nor an engine can make one without end."""
    with pytest.raises(CorruptError, match=f"at most {MAX_HANDLE_BYTES} bytes"):
        Handle.from_json(" " * (MAX_HANDLE_BYTES + 1))
    order = LaunchOrder(
        id="a", spec=IslandSpec(command=("a",), run="/a", name="a"), num_islands=1
    )
    with pytest.raises(UsageError, match="at most"):
        order.handle("local", {"x": "y" * MAX_HANDLE_BYTES}).to_json()
    with pytest.raises(UsageError, match="no JSON"):
        order.handle("local", {"x": object()}).to_json()
