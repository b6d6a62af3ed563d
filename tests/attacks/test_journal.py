"""A journal whose bytes changed: what was promised is there, or its loss is told."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from atoll.coordinator.move import JOURNAL
from atoll.disk import SystemDisk
from atoll.errors import CorruptError
from atoll.journal import Journal
from atoll.journal.log import ENTRY_BYTES
from atoll.testing.fixtures import enter, outcome_of, plain_settings, update_of
from tests.cli.runs import ended, started
from tests.coordinator.serving import Islands, serving

ROUNDS = 4
SEGMENT = "log/00000001"


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that committed some rounds and was stopped."""
    directory = tmp_path_factory.mktemp("journal") / "run"
    with serving(directory, plain_settings(quorum=1)) as coordinator, ExitStack() as on:
        island = Islands(coordinator, on)(key=b"k" * 32)
        joined = enter(island, "a")
        for round in range(1, ROUNDS + 1):
            island.publish(update_of(island, joined, 1.0, round=round))
            outcome_of(island, round)
    return directory


@pytest.fixture
def directory(ended_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, to be damaged."""
    return Path(shutil.copytree(ended_run, tmp_path / "run", symlinks=True))


def change(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


def last_round(directory: Path) -> int:
    disk = SystemDisk(directory / JOURNAL)
    try:
        return Journal.open(disk).recorded.fragments[0].round
    finally:
        disk.close()


def last_record(data: bytes) -> int:
    """Return where the last record begins."""
    return data.rindex(b"\xa7REC")


@pytest.mark.parametrize("is_sealed", [True, False], ids=["stopped", "killed"])
def test_a_flipped_byte_in_the_last_record_forgets_nothing(
    directory: Path, is_sealed: bool, tmp_path: Path
) -> None:
    """Neither after a stop nor after a kill right behind the promise."""
    log = directory / JOURNAL / SEGMENT
    first, size = last_record(log.read_bytes()), log.stat().st_size
    if not is_sealed:
        change(log.with_name(f"{log.name}.end"), lambda data: data[:ENTRY_BYTES])
    for at in range(first, size, (size - first) // 25):
        copy = Path(shutil.copytree(directory, tmp_path / f"{at}"))
        with (copy / JOURNAL / SEGMENT).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))

        assert last_round(copy) == ROUNDS


def test_a_log_that_lost_its_last_record_is_not_opened(directory: Path) -> None:
    """A cut at exactly the end of a record is noticed, and named."""
    log = directory / JOURNAL / SEGMENT
    at = last_record(log.read_bytes())
    change(log, lambda data: data[:at])

    with pytest.raises(CorruptError, match=f"{SEGMENT} is damaged at byte {at}"):
        last_round(directory)


def test_a_log_that_is_gone_is_no_reason_to_begin_a_run(directory: Path) -> None:
    """The weights of a run are not left for a new one with other settings."""
    shutil.rmtree(directory / JOURNAL / "log")

    with (
        pytest.raises(CorruptError, match="log/ is missing"),
        serving(directory, plain_settings(quorum=1)),
    ):
        pass

    assert list((directory / JOURNAL / "states").rglob("*"))


def test_rounds_that_the_log_lost_are_reported_by_what_is_left(
    directory: Path,
) -> None:
    """A state of a round that the log has not is no unfinished file."""
    disk = SystemDisk(directory / JOURNAL)
    Journal.open(disk).compact(0)
    disk.close()
    log = directory / JOURNAL / SEGMENT
    records = [found.start() for found in re.finditer(b"\xa7REC", log.read_bytes())]
    change(log, lambda data: data[: records[-2]])
    log.with_name(f"{log.name}.end").unlink()

    with serving(directory, None) as coordinator:
        status = coordinator.status()

    (report,) = status["damage"]
    assert f"states/0/{ROUNDS} is later than the log, which ends with round" in report
    assert "Islands that still have the lost rounds bring them back" in report
    assert (directory / JOURNAL / "states" / "0" / str(ROUNDS)).exists()


def test_what_was_cut_is_told_everywhere(directory: Path, tmp_path: Path) -> None:
    """By `atoll serve`, in the status and in the events: how much, and where."""
    log = directory / JOURNAL / SEGMENT
    size = log.stat().st_size
    change(log, lambda data: data + b"\xa7REC" + b"torn" * 10)
    place = f"44 bytes at the end of {SEGMENT}, from byte {size} on"

    process = started(
        *("serve", "--dir", directory, "--no-tls", "--json"), home=tmp_path / "home"
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["run"]
    process.send_signal(signal.SIGTERM)
    status, _, complaints = ended(process)

    assert (status, place in complaints) == (0, True)
    lines = (directory / "events.jsonl").read_text().splitlines()
    cuts = [each for each in map(json.loads, lines) if each["event"] == "journal_cut"]
    assert [(each["file"], each["first_byte"], each["bytes"]) for each in cuts] == [
        (SEGMENT, size, 44)
    ]


def test_damage_is_in_the_status_of_a_run_that_goes_on(directory: Path) -> None:
    """A record that was read from its copy is told with its place."""
    log = directory / JOURNAL / SEGMENT
    at = last_record(log.read_bytes())
    change(log, lambda data: data[: at + 40] + b"?" + data[at + 41 :])

    with serving(directory, None) as coordinator:
        status = coordinator.status()

    assert [line.partition(":")[0] for line in status["damage"]] == [
        f"{SEGMENT} is damaged at byte {at}"
    ]
    assert status["round"] == ROUNDS
