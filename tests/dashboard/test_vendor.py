"""The page is small, fetches nothing, and has its libraries as they were published."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "src/atoll/dashboard/page"
VENDOR = PAGE / "vendor"
OWN = sorted(path for path in PAGE.iterdir() if path.is_file())
MAX_BYTES = 220_000


def test_vendored_files_have_their_digests() -> None:
    """Each is listed with its licence, and nothing else is there."""
    listed = tomllib.loads((VENDOR / "SOURCES.toml").read_text())["file"]
    for row in listed:
        data = (VENDOR / row["name"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == row["sha256"], row["name"]
        assert row["licence"]
        assert row["version"]
    licences = {"LICENSE-htm", "LICENSE-preact", "LICENSE-uplot"}
    files = {path.name for path in VENDOR.iterdir()}
    assert files == {row["name"] for row in listed} | licences | {"SOURCES.toml"}


def test_the_page_is_small() -> None:
    """In the wheel, with its libraries and their licences."""
    sizes = [path.stat().st_size for path in PAGE.rglob("*") if path.is_file()]
    assert sum(sizes) < MAX_BYTES


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_text_of_a_run_is_only_ever_text(path: Path) -> None:
    """No markup is made of strings, and nothing is fetched from elsewhere."""
    text = path.read_text()
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\("
    )
    assert not re.search(forbidden, text)
    urls = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert urls <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_file_of_the_page_is_short(path: Path) -> None:
    """One story of at most 400 lines."""
    assert len(path.read_text().splitlines()) <= 400
