"""Which files of a directory are code to be shipped: what .gitignore leaves.

Rule 1: the last pattern that fits decides; one with `!` takes a file back in. Under a
directory that is left out nothing is taken back, as git has it.
Rule 2: a .gitignore counts for what is below it, up to the root of the repository that
the directory is in, with .git/info/exclude before them all. The directory itself was
chosen, and is shipped even if they leave it out by its name.
Rule 3: hidden files, caches, virtual environments, runs' directories and what looks
like a key or a token are left out, whatever a .gitignore says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError

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


@dataclass(frozen=True)
class Tree:
    """What is shipped, and how that is called from the top of its repository."""

    root: Path
    base: str
    """Of the root: empty, or a path and a slash."""

    def name(self, path: Path) -> str:
        return f"{self.base}{path.relative_to(self.root).as_posix()}"

    def base_of(self, directory: Path) -> str:
        return self.base if directory == self.root else f"{self.name(directory)}/"


def code_files(root: Path) -> Iterator[Path]:
    """Yield the files to be shipped, in the order of their names.

    Raises:
        UsageError: what says which these are cannot be read.
    """
    always = [rule for text in (*NEVER, *PRIVATE) if (rule := rule_of(text, ""))]
    base, rules = _from_above(root.resolve())
    yield from _under(root, Tree(root, base), always, rules)


def _under(
    directory: Path, tree: Tree, always: Sequence[Rule], rules: Sequence[Rule]
) -> Iterator[Path]:
    rules = [*rules, *_rules(directory / ".gitignore", tree.base_of(directory))]
    for path in sorted(directory.iterdir(), key=lambda each: each.name):
        is_directory = path.is_dir() and not path.is_symlink()
        name = tree.name(path)
        if path.name.startswith(".") or _is_out(name, always, is_directory):
            continue
        if _is_out(name, rules, is_directory):
            continue
        if not is_directory:
            yield path
        elif not (path / "pyvenv.cfg").exists():
            yield from _under(path, tree, always, rules)


def _is_out(name: str, rules: Sequence[Rule], is_directory: bool) -> bool:
    for rule in reversed(rules):
        if rule.fits(name, is_directory=is_directory):
            return not rule.is_taken_back
    return False


def _from_above(directory: Path) -> tuple[str, list[Rule]]:
    """Return how a directory is called in its repository, and the rules above it."""
    upwards = (directory, *directory.parents)
    # Not every directory above need be one that this user may look into.
    top = next((each for each in upwards if os.path.exists(each / ".git")), None)
    if top is None:
        return "", []
    rules, base, at = _rules(_exclude(top), ""), "", top
    for part in directory.relative_to(top).parts:
        rules += _rules(at / ".gitignore", base)
        at, base = at / part, f"{base}{part}/"
    return base, rules


def _exclude(top: Path) -> Path:
    """Return the patterns of a repository that are nobody else's."""
    git = top / ".git"
    if not git.is_dir():  # of a worktree, or of a submodule
        git = top / _read(git).removeprefix("gitdir:").strip()
    if (git / "commondir").is_file():
        git = git / _read(git / "commondir").strip()
    return git / "info" / "exclude"


def _rules(file: Path, base: str) -> list[Rule]:
    if not file.is_file():
        return []
    return [rule for line in _read(file).splitlines() if (rule := rule_of(line, base))]


def _read(file: Path) -> str:
    try:
        with file.open(errors="replace") as opened:
            return opened.read(MAX_IGNORE_BYTES)
    except OSError as exc:
        raise UsageError(
            f"{file} cannot be read: {exc.strerror}. It says what is not shipped."
        ) from exc


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
