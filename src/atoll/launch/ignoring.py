"""Which files of a directory are code to be shipped: what .gitignore leaves.

Rule 1: the last pattern that fits decides; one with `!` takes a file back in. Under a
directory that is left out nothing is taken back, as git has it.
Rule 2: hidden files, caches, virtual environments, runs' directories and what looks
like a key or a token are left out, whatever a .gitignore says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NEVER = ("__pycache__", "node_modules", "*.atoll", "*.egg-info", "*.pyc")
PRIVATE = ("*.token", "*.pem", "*.key")
MAX_IGNORE_BYTES = 2**20


@dataclass(frozen=True)
class Rule:
    """One line of a .gitignore, for the paths below where that lies."""

    pattern: re.Pattern[str]
    is_taken_back: bool
    is_of_directories: bool

    def fits(self, path: str, *, is_directory: bool) -> bool:
        if self.is_of_directories and not is_directory:
            return False
        return self.pattern.fullmatch(path) is not None


def code_files(root: Path) -> Iterator[Path]:
    """Yield the files to be shipped, in the order of their names."""
    always = [rule for text in (*NEVER, *PRIVATE) if (rule := rule_of(text, ""))]
    yield from _under(root, root, always, [])


def _under(
    directory: Path, root: Path, always: Sequence[Rule], rules: Sequence[Rule]
) -> Iterator[Path]:
    rules = [*rules, *_rules_in(directory, root)]
    for path in sorted(directory.iterdir(), key=lambda each: each.name):
        is_directory = path.is_dir() and not path.is_symlink()
        name = path.relative_to(root).as_posix()
        if path.name.startswith(".") or _is_out(name, always, is_directory):
            continue
        if _is_out(name, rules, is_directory):
            continue
        if not is_directory:
            yield path
        elif not (path / "pyvenv.cfg").exists():
            yield from _under(path, root, always, rules)


def _is_out(name: str, rules: Sequence[Rule], is_directory: bool) -> bool:
    for rule in reversed(rules):
        if rule.fits(name, is_directory=is_directory):
            return not rule.is_taken_back
    return False


def _rules_in(directory: Path, root: Path) -> list[Rule]:
    file = directory / ".gitignore"
    if not file.is_file():
        return []
    with file.open(errors="replace") as opened:
        lines = opened.read(MAX_IGNORE_BYTES).splitlines()
    base = directory.relative_to(root).as_posix()
    start = "" if base == "." else f"{base}/"
    return [rule for line in lines if (rule := rule_of(line, start))]


def rule_of(line: str, base: str) -> Rule | None:
    """Return the rule of a line, or None of one that is empty, a comment or none."""
    text = re.sub(r"(?<!\\)\s+$", "", line)
    if not text or text.startswith("#"):
        return None
    is_taken_back = text.startswith("!")
    text = text[1:] if is_taken_back else text.removeprefix("\\")
    is_of_directories = text.endswith("/")
    text = text.rstrip("/")
    # With a slash in it a pattern is for that place, without for any depth.
    where = "" if "/" in text else "(?:.*/)?"
    try:
        pattern = re.compile(re.escape(base) + where + _translated(text.lstrip("/")))
    except re.error:
        return None  # as in [z-a], which fits nothing for git either
    return Rule(pattern, is_taken_back, is_of_directories)


def _translated(text: str) -> str:
    """Return a pattern of git's as a regular expression."""
    parts = re.split(r"(\*\*/|/\*\*$|\*|\?|\[!?[^]]+\])", text)
    known = {"**/": "(?:.*/)?", "/**": "/.*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        known.get(part)
        or (part.replace("[!", "[^") if part.startswith("[") else re.escape(part))
        for part in parts
    )
