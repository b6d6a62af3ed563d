"""The journal on the machine's own disk, with processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.disk import SystemDisk
from atoll.errors import CorruptError, UsageError
from atoll.journal import Journal
from atoll.simulate.world import SimDisk
from tests.journal.runs import LARGE, SMALL, Run, bits, view

ROOT = Path(__file__).parents[2]
ENDLESS = """
import sys
from atoll.disk import SystemDisk
from tests.journal.runs import Run
run = Run(SystemDisk(sys.argv[1]))
run.create_or_open()
if not run.states:
    run.found()
while True:
    for fragment in (0, 1):
        run.commit(fragment, value=2.0 ** -20)
        print(fragment, run.states[fragment].round, flush=True)
    if run.states[0].round % 4 == 0:
        run.journal.compact(0)
        run.journal.compact(1)
"""


def expected(rounds: int) -> Run:
    """Return a run that has gone that far without any trouble."""
    run = Run(SimDisk()).start()
    for _ in range(rounds):
        run.commit(0, value=2.0**-20)
        run.commit(1, value=2.0**-20)
    return run


def test_a_killed_process_loses_nothing_it_was_told(tmp_path: Path) -> None:
    """After SIGKILL at some instant, the next owner has every round that was said."""
    told = 0
    for said_rounds in (1, 21):
        with subprocess.Popen(
            [sys.executable, "-c", ENDLESS, tmp_path],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            for _ in range(said_rounds):
                assert process.stdout.readline()
                told += 1
            with pytest.raises(UsageError, match=f"to process {process.pid}, which"):
                SystemDisk(tmp_path)
            os.kill(process.pid, signal.SIGKILL)
            # What it had said by then counts, too.
            told += len(process.stdout.readlines())
            process.wait()

    disk = SystemDisk(tmp_path)
    run = Run(disk).reopen()
    rounds = [state.round for state in run.states]
    # Rounds of the two fragments take turns; the last one may not have been said.
    assert told <= sum(rounds) <= told + 2
    twin = expected(max(rounds))
    for index, state in enumerate(run.states):
        assert bits(state) == twin.after[index, state.round]
    assert run.journal.damage == []
    disk.close()


def test_a_journal_is_the_same_on_any_disk(tmp_path: Path) -> None:
    """What the machine's disk holds is, file for file, what the simulated one holds."""
    disk = SystemDisk(tmp_path)
    run = Run(disk, sizes=(SMALL, LARGE)).start()
    for _ in range(3):
        run.commit(0, value=2.0**-20)
        run.commit(1, value=2.0**-20)
    twin = expected(3)

    assert view(run.journal) == view(twin.journal)
    assert disk.names("") == twin.disk.names("")
    for name in disk.names(""):
        if name != "receipts.key":  # random
            assert disk.read(name) == twin.disk.read(name)
    disk.close()


def test_an_end_is_sealed_beside_the_rounds(tmp_path: Path) -> None:
    """One thread commits and another seals: the journal is whole, and proved."""
    disk = SystemDisk(tmp_path)
    run, has_ended = Run(disk).start(), threading.Event()

    def seal() -> None:
        while not has_ended.is_set():
            run.journal.seal()

    with ThreadPoolExecutor(1) as threads:
        sealing = threads.submit(seal)
        for _ in range(30):
            run.commit(0)
        has_ended.set()
        sealing.result()
    run.journal.seal()
    disk.close()
    log = tmp_path / "log" / "00000001"
    data = log.read_bytes()

    run.disk = disk = SystemDisk(tmp_path)
    run.reopen().check()
    assert (run.journal.damage, run.journal.cut) == ([], None)
    assert disk.names("log/") == ["log/00000001", "log/00000001.end"]
    disk.close()
    log.write_bytes(data[: data.rindex(b"\xa7REC")])
    disk = SystemDisk(tmp_path)
    with pytest.raises(CorruptError, match="log/00000001 is damaged at byte"):
        Journal.open(disk)
    disk.close()


def test_a_small_round_costs_two_fsyncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the first round of a life nor any other pays for a directory."""
    disk = SystemDisk(tmp_path)
    run = Run(disk).start()
    run.commit(0)
    disk.close()
    run.disk = disk = SystemDisk(tmp_path)
    run.reopen()
    synced: list[int] = []
    sync = os.fsync

    def counted(handle: int) -> None:
        synced.append(handle)
        sync(handle)

    monkeypatch.setattr(os, "fsync", counted)
    for _ in range(3):
        synced.clear()
        run.commit(0)
        assert len(synced) == 2
    disk.close()
