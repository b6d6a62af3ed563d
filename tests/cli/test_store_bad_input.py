"""What people are told by the commands when a store, or a machine, is not as it should.

Each answer has its exit code, says what is wrong, and names the way out.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.runs import ISLAND, RUN_FILE, atoll, ended, started
from tests.cli.test_store_buckets import come
from tests.store.buckets import BUCKET, EVERYTHING, Settings, as_without

LATER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(which, now);
    if (!failed && which == CLOCK_REALTIME) now->tv_sec += 3600;
    return failed;
}
"""
"""Loaded before the C library: what time it is, an hour from now."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "train.py").write_text(ISLAND)
    return tmp_path


@pytest.fixture(scope="module")
def an_hour_ahead(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What sets the clock of a process an hour ahead, as another machine's may be."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("cc is not installed, which builds another clock")
    folder = tmp_path_factory.mktemp("clock")
    source, built = folder / "later.c", folder / "later.so"
    source.write_text(LATER)
    words = ["-shared", "-fPIC", "-o", str(built), str(source), "-ldl"]
    subprocess.run([compiler, *words], check=True)
    return str(built)


@pytest.mark.parametrize("lacking", EVERYTHING)
def test_whoever_lacks_a_permission_neither_makes_a_run_nor_joins_one(
    lacking: str, s3: Settings, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 4 and the permission, at once: COMMAND is not started."""
    url, home = f"s3://{BUCKET}/joined-without-{lacking.lower()}", place / "home"
    come(monkeypatch, s3)
    assert atoll("init", url, place / "run.toml", home=home)[0] == 0
    come(monkeypatch, s3 | as_without(lacking))
    commands: tuple[tuple[str | Path, ...], ...] = (
        ("init", f"{url}-new", place / "run.toml"),
        ("join", url, "--", "touch", place / "has-begun"),
    )
    for words in commands:
        code, _, err = atoll(*words, home=home)
        assert code == 4, err
        assert f"Give its credentials s3:{lacking}" in err
    assert not (place / "has-begun").exists()


def test_a_bucket_that_is_not_there_is_told(
    s3: Settings, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 3 after some tries: it may come back, and somebody has to make it."""
    come(monkeypatch, s3 | as_without("nothing"))
    code, _, err = atoll("status", "s3://vanished/run", home=place / "home")
    assert code == 3, err
    assert "s3://vanished/run does not exist" in err
    assert "Create the bucket, or correct the URL" in err


def test_settings_that_somebody_has_edited_start_nothing(place: Path) -> None:
    """Exit code 5, and what may be changed how."""
    url, home = place / "store", place / "home"
    assert atoll("init", url, place / "run.toml", home=home)[0] == 0
    object_ = url / "settings" / "0"
    before = object_.read_text()
    object_.write_text(before.replace('sync_every":4', 'sync_every":5'))
    assert object_.read_text() != before

    for words in (("status", url), ("join", url, "--", "touch", place / "has-begun")):
        code, _, err = atoll(*words, home=home)
        assert code == 5, err
        assert "settings/0 cannot be read: its bytes do not match the digest" in err
        assert "Change settings with `atoll control`" in err
    assert not (place / "has-begun").exists()


def test_a_cloud_that_minds_a_wrong_clock_says_so(
    s3: Settings,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    an_hour_ahead: str,
) -> None:
    """Its signatures are dated: exit code 4, and to set the clock is the way out."""
    url, home = f"s3://{BUCKET}/punctual", place / "home"
    come(monkeypatch, s3)
    code, _, err = atoll(
        "init", url, place / "run.toml", home=home, LD_PRELOAD=an_hour_ahead
    )
    assert code == 4, err
    assert "the clock of this machine is too far off. Set it" in err


def test_an_island_whose_clock_is_an_hour_ahead_is_one_like_others(
    place: Path, an_hour_ahead: str
) -> None:
    """Where nobody dates requests, no clock is compared with another's."""
    url, home = place / "store", place / "home"
    assert atoll("init", url, place / "run.toml", home=home)[0] == 0
    script = place / "train.py"
    islands = [
        started(
            "join", url, "--island", name, "--", script, home=home, LD_PRELOAD=clock
        )
        for name, clock in (("far", an_hour_ahead), ("near", ""))
    ]
    said = {}
    for code, out, err in map(ended, islands):
        assert code == 0, err
        said.update(dict([out.split()]))
    assert said.keys() == {"far", "near"}
    assert len(set(said.values())) == 1
    code, page, _ = atoll("status", url, "--json", home=home, LD_PRELOAD=an_hour_ahead)
    assert (code, json.loads(page)["state"]) == (0, "ended")
