"""Prose is plain technical English: docstrings, comments, messages, pages, help."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.style.prose import prose_hits
from tests.style.ratchet import differences


def test_roundabout_phrases_only_become_fewer() -> None:
    """No package and no page has more of them than `ratchet.toml` allows."""
    assert differences("prose") == []


def test_public_docstrings_only_become_plainer() -> None:
    """Docstrings that users see have no more of them than `ratchet.toml` allows."""
    assert differences("public") == []


@pytest.mark.parametrize(
    "sentence",
    [
        "What an island loads before its first update.",
        "Who closes; nobody only looks.",
        "The island is told why.",
        "Return the state, for who wants it.",
        "The run goes on.",
        "Keeps what was sent.",
    ],
)
def test_a_roundabout_phrase_is_reported(sentence: str, tmp_path: Path) -> None:
    """In a docstring, a comment, a message and a page alike."""
    code = tmp_path / "code.py"
    code.write_text(f'"""{sentence}"""\n# {sentence}\nraise ValueError("{sentence}")\n')
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{sentence}\n")

    assert {hit.line for hit in prose_hits(code)} == {1, 2, 3}
    assert {hit.line for hit in prose_hits(page)} == {3}


@pytest.mark.parametrize(
    "sentence",
    [
        "Return the islands that published an update.",
        "What closes a round?",
        "A client retries after a timeout.",
        "Operators, who run the coordinator, see the event log.",
        "Decide what to do next.",
        "Call `who` and `what is` as documented.",
    ],
)
def test_plain_english_is_not_reported(sentence: str, tmp_path: Path) -> None:
    """Questions, relative clauses with a noun, and code are left alone."""
    page = tmp_path / "page.md"
    page.write_text(sentence)

    assert prose_hits(page) == ()


def test_a_phrase_is_found_across_lines(tmp_path: Path) -> None:
    """A line break inside a docstring or a comment hides nothing; code blocks do."""
    code = tmp_path / "code.py"
    code.write_text('"""A sentence that goes\non."""\nx = 1\n# it goes\n# on\n')
    page = tmp_path / "page.md"
    page.write_text("```\nnobody\n```\n")

    assert [hit.line for hit in prose_hits(code)] == [1, 4]
    assert prose_hits(page) == ()
