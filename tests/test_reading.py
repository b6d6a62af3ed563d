"""docs/reading.md describes the files that an update and a heartbeat run through."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HTTP, BUCKET, MEMORY, HEARTBEAT = "http", "bucket", "memory", "heartbeat"

SECTIONS = {
    HTTP: "One update over HTTP",
    BUCKET: "One update in a bucket",
    MEMORY: "One update in memory",
}
MAX_FILES = {HTTP: 77, BUCKET: 59, MEMORY: 40, HEARTBEAT: 38}


@cache
def traced() -> dict[str, set[str]]:
    """Return the files of each path in a real run, traced in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.update_trace"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    return {path: set(files) for path, files in json.loads(done.stdout).items()}


@cache
def described() -> dict[str, set[str]]:
    """Return the files that each section of the page names."""
    sections = (ROOT / "docs/reading.md").read_text().split("\n## ")[1:]
    by_title = {text.splitlines()[0]: text for text in sections}
    return {
        path: set(re.findall(r"`([a-z_/]+\.py)`", by_title[title]))
        for path, title in SECTIONS.items()
    }


@pytest.mark.torch
@pytest.mark.parametrize("path", MAX_FILES)
def test_a_path_is_short(path: str) -> None:
    """An update and a heartbeat run through few files."""
    assert len(traced()[path]) <= MAX_FILES[path], sorted(traced()[path])


@pytest.mark.torch
def test_the_page_names_every_file_of_an_update_over_http() -> None:
    """The first section has exactly the files of the path."""
    assert described()[HTTP] == traced()[HTTP]


@pytest.mark.torch
@pytest.mark.parametrize("path", [BUCKET, MEMORY])
def test_other_exchanges_replace_files(path: str) -> None:
    """A section has exactly the files that an update over HTTP does not use."""
    assert described()[path] == traced()[path] - traced()[HTTP]


@pytest.mark.torch
def test_a_heartbeat_takes_the_path_of_an_update() -> None:
    """A heartbeat uses no file that an update does not use."""
    assert traced()[HEARTBEAT] <= traced()[HTTP]
