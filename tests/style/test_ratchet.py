"""Counts in `ratchet.toml` only fall."""

from __future__ import annotations

from pathlib import Path

from tests.style.ratchet import FILE, recorded, rises, update


def test_a_count_that_rises_is_named() -> None:
    """The sentence has the place, both counts, and the command that shows the hits."""
    sentences = rises("prose", {"docs/a.md": 2}, {"docs/a.md": 3, "docs/b.md": 1})

    assert sentences == [
        "docs/a.md: prose rose from 2 to 3. See: "
        "python -m tests.style --prose docs/a.md",
        "docs/b.md: prose rose from 0 to 1. See: "
        "python -m tests.style --prose docs/b.md",
    ]


def test_an_update_refuses_to_raise_a_count(tmp_path: Path) -> None:
    """The file stays unchanged, and every rise is reported."""
    file = tmp_path / "ratchet.toml"
    file.write_text('["src/atoll"]\nimport_percent = 1.0\nduplicates = []\n')

    refusals = update(file)

    duplicates = [text for text in refusals if ": duplicates: " in text]
    assert duplicates == rises("duplicates", {}, recorded("duplicates"))
    assert "duplicates = []" in file.read_text()


def test_an_update_lowers_counts(tmp_path: Path) -> None:
    """Counts of sections that have improved, or are gone, are lowered."""
    file = tmp_path / "ratchet.toml"
    file.write_text(FILE.read_text() + '\n["docs/removed.md"]\nprose = 3\n')

    assert update(file) == []
    assert file.read_text() == FILE.read_text()


def test_code_that_moves_takes_its_counts_along(tmp_path: Path) -> None:
    """With `--moved` a package may gain what others lost, and no more than that."""
    file = tmp_path / "ratchet.toml"
    section = max(recorded("names"))
    text = FILE.read_text()
    moved = text.replace(f'["{section}"]', '["src/atoll/old"]')
    file.write_text(moved)

    assert update(file) != []
    assert file.read_text() == moved

    assert update(file, is_move=True) == []
    assert file.read_text() == text
