"""Names of classes are unique, and names of values have content."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.style.names import name_hits
from tests.style.ratchet import SHARED_CLASSES, differences
from tests.style.tree import class_homes
from tests.style.words import hint_of


def test_a_class_name_means_one_class() -> None:
    """No class name is new in two modules, and old ones leave the list."""
    assert differences("duplicates") == []


def test_shared_class_names_are_shared() -> None:
    """A class name is listed with a reason only while it means several classes."""
    homes = class_homes()

    assert [name for name in SHARED_CLASSES if len(homes.get(name, ())) < 2] == []


def test_contentless_names_only_become_fewer() -> None:
    """No package assigns more names without content than `ratchet.toml` allows."""
    assert differences("names") == []


def test_a_name_without_content_is_reported() -> None:
    """A noun beside such a word gives the name its content."""
    assert hint_of("said") == "reply, message, output"
    assert hint_of("_kept") is not None
    assert hint_of("all_told") is not None
    assert hint_of("told_islands") is None
    assert hint_of("is_known") is None
    assert hint_of("config") is None


def test_left_and_right_are_a_pair(tmp_path: Path) -> None:
    """`left` has no content alone, and is plain beside `right`."""
    file = tmp_path / "pair.py"
    file.write_text(
        "def split(left, right): ...\ndef count(left): ...\n"  # reported
    )

    assert [hit.line for hit in name_hits(file)] == [2]


def test_every_kind_of_assignment_is_seen(tmp_path: Path) -> None:
    """Parameters, targets, attributes, captures and handlers all assign names."""
    code = (
        "said = 1\n"
        "for said in (): ...\n"
        "with open('') as said: ...\n"
        "def f(said, *told, **kept): ...\n"
        "x = [said for said in ()]\n"
        "x.said = 1\n"
        "try: ...\n"
        "except OSError as said: ...\n"
        "match x:\n"
        "    case [said, *told]: ...\n"
    )
    file = tmp_path / "assigned.py"
    file.write_text(code)
    ast.parse(code)

    lines = sorted(hit.line for hit in name_hits(file))

    assert lines == [1, 2, 3, 4, 4, 4, 5, 6, 8, 10, 10]
