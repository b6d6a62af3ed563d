"""The prose of the repository, and the roundabout phrases in it.

Of a Python file, prose is docstrings, comments and strings of three words or more; of
any other file, the text outside of code blocks. Code in backticks is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.style.tree import ROOT, docstrings, nodes, text_of
from tests.style.words import PHRASES

MARKDOWN = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md"]
HELP = "tests/cli/help.txt"
"""The golden listing of every `--help`."""


class Hit(NamedTuple):
    """One phrase or one name that has a plainer alternative."""

    file: Path
    line: int
    text: str
    hint: str

    def __str__(self) -> str:
        path = self.file.relative_to(ROOT)
        return f"{path}:{self.line}: {self.text} -> {self.hint}"


def documents() -> list[Path]:
    """Return the documents that are linted: pages for users, and the help texts."""
    pages = [ROOT / name for name in MARKDOWN]
    return [*pages, *sorted((ROOT / "docs").rglob("*.md")), ROOT / HELP]


@cache
def prose_hits(file: Path) -> tuple[Hit, ...]:
    """Return the roundabout phrases of a file, in order of lines."""
    hits = []
    for line, text in _prose(file):
        plain = re.sub(r"`[^`]*`", lambda code: "X" * len(code[0]), text)
        end = 0
        for start, stop, hint in sorted(_matches(plain)):
            if start >= end:
                phrase = " ".join(plain[start:stop].split())
                at_line = line + plain.count("\n", 0, start)
                hits.append(Hit(file, at_line, phrase.strip(",;:|( "), hint))
                end = stop
    return tuple(sorted(hits, key=lambda hit: hit.line))


def _matches(text: str) -> Iterator[tuple[int, int, str]]:
    for phrase in PHRASES:
        for match in phrase.pattern.finditer(text):
            if not _is_question(text, match.start()):
                yield match.start(), match.end(), phrase.hint


def _is_question(text: str, start: int) -> bool:
    end = re.compile(r"[.?!](?:\s|$)|\n\s*\n|$").search(text, start)
    return end is not None and end[0].startswith("?")


def _prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the pieces of prose of a file, each with the line on which it begins."""
    if file.suffix == ".py":
        yield from _strings(file)
        yield from _comments(file)
    elif file.suffix == ".md":
        yield from _markdown(text_of(file))
    else:
        yield from enumerate(text_of(file).splitlines(), 1)


def _strings(file: Path) -> Iterator[tuple[int, str]]:
    alone = {id(node) for node in docstrings(file)}
    parts = set()
    for node in nodes(file):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(value) for value in node.values}
            yield (
                node.lineno,
                "".join(
                    str(value.value) if isinstance(value, ast.Constant) else "X"
                    for value in node.values
                ),
            )
    for node in nodes(file):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in parts
            and (id(node) in alone or len(node.value.split()) > 2)
        ):
            yield node.lineno, node.value


def _comments(file: Path) -> Iterator[tuple[int, str]]:
    """Yield comments; whole-line comments that follow each other are one."""
    first, block = 0, ""
    for number, line in enumerate([*text_of(file).splitlines(), ""], 1):
        bare = line.strip()
        if bare.startswith("#"):
            first = first if block else number
            block += bare.lstrip("#: ") + "\n"
            continue
        if block:
            yield first, block
            block = ""
        _, mark, comment = line.partition("  # ")
        if mark:
            yield number, comment


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line
