"""Failure and threat model: every line names the tests that show it; they exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGE, THREATS = DOCS / "failure-model.md", DOCS / "threat-model.md"
UNSHOWN = ("Failures that are not survived", "Attacks that are not defended")
"""Sections whose lines may say why no test shows them."""

LINK = re.compile(r"\[`(\w+)`\]\(([^)]+)\)")


def lines() -> Iterator[tuple[str, str, str]]:
    """Yield section, first cell and last cell of every line of every table."""
    section = ""
    for line in (PAGE.read_text() + THREATS.read_text()).splitlines():
        section = line[3:] if line.startswith("## ") else section
        if line.startswith("| ") and not line.endswith("| shown by |"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            yield section, cells[0], cells[-1]


@cache
def claims_of(file: Path) -> frozenset[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse(file.read_text())
    functions = (each for each in tree.body if isinstance(each, ast.FunctionDef))
    return frozenset(each.name for each in functions if each.name.startswith("test_"))


@pytest.mark.parametrize(
    ("section", "claim", "shown_by"), list(lines()), ids=lambda cell: cell[:40]
)
def test_every_line_is_shown_by_tests_that_exist(
    section: str, claim: str, shown_by: str
) -> None:
    """What is survived has a test; what is not may say why it has none."""
    links = LINK.findall(shown_by)
    if not links:
        assert section in UNSHOWN
        assert shown_by.startswith("not shown")
    for name, path in links:
        assert name in claims_of((PAGE.parent / path).resolve())


def test_nothing_stands_beside_the_links() -> None:
    """A link that is misspelt is not taken for a remark."""
    for _, claim, shown_by in lines():
        rest = LINK.sub("", shown_by)
        assert rest.strip(" ,") == "" or rest.startswith("not shown"), claim


def test_every_scenario_is_in_the_model() -> None:
    """A failure that is tried is a failure that the page speaks of."""
    scenarios = PAGE.parents[1] / "tests" / "scenarios"
    names = ("test_failures.py", "test_limits.py", "test_rollback.py")
    tried = frozenset().union(*(claims_of(scenarios / name) for name in names))

    assert tried - set(re.findall(r"`(test_\w+)`", PAGE.read_text())) == set()


def test_every_attack_is_in_a_model() -> None:
    """An attack that is tried is one that a page speaks of."""
    pages = PAGE.read_text() + THREATS.read_text()
    attacks = PAGE.parents[1] / "tests" / "attacks"
    unnamed = {
        file.name
        for file in attacks.glob("test_*.py")
        if not claims_of(file) & set(re.findall(r"`(test_\w+)`", pages))
    }

    assert unnamed == set()
