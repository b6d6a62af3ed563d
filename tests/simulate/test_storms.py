"""Whole storms over a small world: the same bytes, and nothing durable lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from atoll.simulate import random_plan, timeline
from tests.simulate.toy import ISLANDS, SPAN_S, Toy, storm

ROOT = Path(__file__).parents[2]


def printed(hash_seed: str) -> str:
    """Return what four storms print in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulate.toy", "1", "2", "3", "40"],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_same_seed_is_the_same_run_byte_for_byte() -> None:
    """Two interpreters with different string hashes see the same storms."""
    first = printed("0")

    assert first == printed("4242")
    assert len(first.splitlines()) == 4 * 6


def test_a_repeated_run_is_the_same_in_one_process_too() -> None:
    """Nothing is left over from one world to the next; another seed is another run."""
    assert storm(5).digest() == storm(5).digest() != storm(6).digest()


def test_watching_changes_nothing() -> None:
    """A run without a trace ends exactly where one with a trace does."""
    plan = random_plan(9, ISLANDS, span_s=SPAN_S)
    seen, unseen = Toy(9, plan), Toy(9, plan)
    unseen.world.scheduler.trace = None
    seen.run()
    unseen.run()

    assert seen.confirmed == unseen.confirmed
    assert seen.world.scheduler.events == unseen.world.scheduler.events
    assert seen.journal() == unseen.journal()


def test_nothing_confirmed_is_lost_in_any_storm() -> None:
    """What was synced before it was confirmed is there after every storm."""
    for seed in range(30):
        assert storm(seed).lost() == [], seed


def test_storms_find_a_commit_that_is_confirmed_before_it_is_durable() -> None:
    """The same program without its sync loses something within a few storms."""
    for seed in range(40):
        toy = Toy(seed, random_plan(seed, ISLANDS, span_s=SPAN_S), syncs=False)
        toy.run()
        if toy.lost():
            return
    raise AssertionError("forty storms have found nothing")


def test_a_storm_can_be_read() -> None:
    """The timeline tells faults, deaths, messages and disk calls in order of time."""
    toy = storm(2)
    lines = list(timeline(toy.happenings))

    assert [each.at_s for each in toy.happenings] == sorted(
        each.at_s for each in toy.happenings
    )
    told = {each.action for each in toy.happenings}
    assert {"start", "send", "deliver", "append", "sync"} <= told
    assert {each.subject for each in toy.happenings} >= {"coordinator", "i0", "fault"}
    assert all(" s  " in line for line in lines)
