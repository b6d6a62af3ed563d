"""The table of verbs: summaries, lazy imports and completion."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cli import EXAMPLES, MODULES, VERB_EXAMPLES, VERBS, load_command

HELP = Path(__file__).parent / "help.txt"
CODE = """
import sys
from atoll.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def run(*argv: str, **environment: str) -> tuple[str, set[str]]:
    """Run the command line in a process; return its output and the loaded modules."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *argv],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, set(done.stderr.split())


def loaded_verbs(modules: set[str]) -> list[str]:
    """Return the verbs with a loaded module."""
    return [v for v in VERBS if f"atoll.cli.{MODULES.get(v, v)}" in modules]


@pytest.mark.parametrize("verb", VERBS)
def test_a_summary_is_the_first_line_of_the_verbs_help(verb: str) -> None:
    """The table and the docstring of the verb have the same text."""
    paragraph, *_ = load_command(verb).help.split("\n\n")

    assert VERBS[verb] == paragraph


@pytest.mark.parametrize("verb", VERBS)
def test_no_summary_is_cut(verb: str) -> None:
    """The list of verbs shows every summary in full, on one line."""
    listing, _ = HELP.read_text().split("$ atoll demo --help\n")

    width = max(map(len, VERBS))
    assert f"  {verb:<{width}}  {VERBS[verb]}\n" in listing


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_an_option_of_the_group_imports_no_verb(option: str) -> None:
    """It loads three modules of ours, and no library but the parser."""
    _, modules = run(option)
    ours = {name for name in modules if name.split(".")[0] == "atoll"}

    assert ours == {"atoll", "atoll.cli", "atoll.errors"}
    libraries = {"rich", "numpy", "cryptography", "pydantic", "h11", "ssl", "asyncio"}
    assert modules & libraries == set()
    assert loaded_verbs(modules) == []


def test_a_called_verb_is_the_only_one_imported() -> None:
    """The help of a verb loads the module of that verb, and of no other."""
    output, modules = run("inspect", "--help")

    assert output.startswith("Usage: atoll inspect ")
    assert loaded_verbs(modules) == ["inspect"]


@pytest.mark.parametrize(
    "example",
    [*EXAMPLES, *(line for lines in VERB_EXAMPLES.values() for line in lines)],
)
def test_examples_of_help_are_commands(example: str) -> None:
    """Every example has a verb, and options and arguments that the verb accepts."""
    program, verb, *argv = shlex.split(example)

    assert program == "atoll"
    load_command(verb).make_context(verb, argv, resilient_parsing=False)


def test_the_shell_completes_verbs_without_importing_them() -> None:
    """A tab after `atoll s` offers the verbs with that letter."""
    output, modules = run(
        _ATOLL_COMPLETE="complete_bash", COMP_WORDS="atoll s", COMP_CWORD="1"
    )

    assert output.split() == ["serve", "scale", "status", "simulate"]
    assert loaded_verbs(modules) == []


def test_the_shell_completes_options_of_a_verb() -> None:
    """A tab after `atoll serve --l` offers the options of serve."""
    output, modules = run(
        _ATOLL_COMPLETE="complete_bash", COMP_WORDS="atoll serve --l", COMP_CWORD="2"
    )

    assert output.split() == ["--listen", "--linger"]
    assert loaded_verbs(modules) == ["serve"]
