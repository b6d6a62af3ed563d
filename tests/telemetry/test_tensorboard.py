"""Curves for TensorBoard: what is on them, and what is needed to write them."""

from __future__ import annotations

import doctest
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.telemetry import (
    Event,
    EventBus,
    tensorboard,
)
from atoll.telemetry.tensorboard import (
    MAX_TAGS,
    Scalar,
    TensorBoardWriter,
    scalars_of,
)

proto = pytest.importorskip("tensorboardX.proto.event_pb2")


def loss(**changes: Any) -> Event:
    """Return an island's report of its loss."""
    fields = {"island": "i0", "round": 1, "inner_steps": 40, "tokens": 5000}
    return EventBus().emit("loss_reported", **fields | {"loss": 2.5} | changes)


def committed(**changes: Any) -> Event:
    """Return a round of fragment 2 that took three seconds."""
    fields = {"fragment": 2, "round": 7, "counted": 4, "late": 1, "refused": 0}
    more = {"seconds": 3.0, "bytes": 100, "digest": "ab", "tokens": 9000}
    return EventBus().emit("round_committed", **fields | more | changes)


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a file: each a length, a checksum, bytes, a checksum."""
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield proto.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_a_loss_is_drawn_against_tokens_and_inner_steps() -> None:
    """One curve of each kind per island."""
    assert list(scalars_of(loss(metrics={"lr": 0.5}))) == [
        Scalar("loss_by_tokens/i0", 5000, 2.5, "tokens"),
        Scalar("loss_by_inner_steps/i0", 40, 2.5, "inner_steps"),
        Scalar("lr/i0", 40, 0.5, "inner_steps"),
    ]


def test_a_round_is_drawn_against_its_number() -> None:
    """One curve per fragment for time, verdicts, bytes; and how long islands stood."""
    assert list(scalars_of(committed(stall_share_mean=0.25))) == [
        Scalar("round_seconds/fragment-2", 7, 3.0),
        Scalar("round_counted/fragment-2", 7, 4.0),
        Scalar("round_late/fragment-2", 7, 1.0),
        Scalar("round_refused/fragment-2", 7, 0.0),
        Scalar("round_bytes/fragment-2", 7, 100.0),
        Scalar("round_tokens/fragment-2", 7, 9000.0),
        Scalar("stall_share_mean", 7, 0.25),
    ]


def test_what_is_not_known_is_not_drawn() -> None:
    """A loss that was not finite leaves a gap, and other events leave nothing."""
    assert list(scalars_of(loss(loss=None))) == []
    assert list(scalars_of(EventBus().emit("run_created"))) == []


def test_a_file_holds_what_was_drawn(tmp_path: Path) -> None:
    """TensorBoard finds its version, then the points, the first ones at once."""
    write = TensorBoardWriter(tmp_path / "curves")

    write(loss())

    (file,) = (tmp_path / "curves").glob("events.out.tfevents.*")
    head, first, second = records(file)
    assert head.file_version == "brain.Event:2"
    assert (first.step, first.summary.value[0].tag) == (5000, "loss_by_tokens/i0")
    assert second.summary.value[0].simple_value == 2.5
    assert second.wall_time > 1e9
    write.close()


def test_points_that_come_together_are_flushed_together(tmp_path: Path) -> None:
    """A thousand reports a second do not keep the disk from the journal."""
    write = TensorBoardWriter(tmp_path)

    for at_s in (10.0, 10.5, 11.0):
        write(replace(loss(), at_unix_s=at_s))
    (file,) = tmp_path.iterdir()
    assert [each.wall_time for each in records(file)][1:] == [10.0, 10.0]

    write(replace(loss(), at_unix_s=12.0))
    assert len(list(records(file))) == 1 + 2 * 4
    write(replace(loss(), at_unix_s=12.5))
    write.close()
    assert len(list(records(file))) == 1 + 2 * 5


def test_a_disk_that_fails_is_left_alone_for_a_minute(tmp_path: Path) -> None:
    """Events are counted meanwhile, and curves go on afterwards in a new file."""
    write = TensorBoardWriter(tmp_path / "curves")
    (tmp_path / "curves").touch()  # a file where the directory should be

    with pytest.raises(OSError, match="curves"):
        write(replace(loss(), at_unix_s=100.0))
    (tmp_path / "curves").unlink()
    write(replace(loss(), at_unix_s=159.0))
    assert not (tmp_path / "curves").exists()
    write(replace(loss(), at_unix_s=160.0))
    write.close()

    assert write.lost == 2
    (file,) = (tmp_path / "curves").iterdir()
    assert len(list(records(file))) == 3


def test_closing_is_safe_to_repeat(tmp_path: Path) -> None:
    """And the next event begins a new file."""
    write = TensorBoardWriter(tmp_path)
    for _ in range(2):
        write(loss())
        write.close()
        write.close()

    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    """A run without a report leaves no empty file."""
    TensorBoardWriter(tmp_path / "curves")(EventBus().emit("run_created"))

    assert not (tmp_path / "curves").exists()


def test_islands_cannot_make_curves_without_end(tmp_path: Path) -> None:
    """Names beyond the bound are left out; known ones go on."""
    write = TensorBoardWriter(tmp_path)
    for number in range(MAX_TAGS // 100 + 1):
        write(loss(loss=None, metrics={f"m{number}-{n}": 1.0 for n in range(100)}))
    write(loss(loss=None, metrics={"m0-0": 2.0}))
    write.close()

    (file,) = tmp_path.iterdir()
    tags = [value.tag for each in records(file) for value in each.summary.value]
    assert len(set(tags)) == MAX_TAGS
    assert tags[-1] == "m0-0/i0"


def test_a_missing_package_is_named_with_its_remedy() -> None:
    """Whoever asks for TensorBoard without the extra is told what to install."""
    code = (
        "import sys\n"
        "sys.modules['tensorboardX'] = None\n"
        "from pathlib import Path\n"
        "from atoll.errors import UsageError\n"
        "from atoll.telemetry.tensorboard import TensorBoardWriter\n"
        "try: TensorBoardWriter(Path('x'))\n"
        "except UsageError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert "pip install 'atoll[tensorboard]'" in done.stdout
    assert "tensorboardX" in done.stdout


def test_telemetry_loads_no_tensorboard() -> None:
    """Who does not ask for curves does not pay for their package."""
    code = "import sys, atoll.telemetry\nprint('tensorboardX' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False"


def test_examples_in_docstrings_hold() -> None:
    """What the docstrings show is what happens."""
    assert doctest.testmod(tensorboard).failed == 0
