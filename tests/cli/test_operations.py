"""docs/operations.md: its commands are executed, in their order."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from atoll.cli import load_command
from atoll.errors import (
    CorruptError,
    NoRows,
    Refused,
    Unreachable,
    UsageError,
    exit_code,
)
from tests.cli.runs import ISLAND, Served, atoll, ended, serving, started

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
COMMANDS = re.findall(r"^    atoll (.*)$", DOCUMENT.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one(line: str) -> None:
    """Verb, options and arguments are those of the command line."""
    verb, *words = shlex.split(line)
    command = load_command(verb)

    command.make_context(verb, words)


def test_every_option_of_serve_is_in_the_table() -> None:
    """The table of options is the list of options."""
    serve = load_command("serve")
    known = {
        each.opts[0] for each in serve.params if each.param_type_name == "option"
    } - {"--help", "-h"}
    listed = re.findall(r"^\| `(--[a-z-]+)", DOCUMENT.read_text(), flags=re.MULTILINE)

    assert set(listed) == known


def test_the_exit_codes_are_those_of_the_page() -> None:
    """2 usage, 3 unreachable, 4 refused, 5 corrupt, 6 not to be started again."""
    kinds = (UsageError, Unreachable, Refused, CorruptError, NoRows)

    assert [exit_code(kind("")) for kind in kinds] == [2, 3, 4, 5, 6]
    for code in range(7):
        assert re.search(rf"^\| {code} \| ", DOCUMENT.read_text(), flags=re.MULTILINE)


def ask(served: Served, place: Path, start: str) -> str:
    """Run the page's one command that starts so, and return what it prints."""
    (line,) = [line for line in COMMANDS if line == start]
    code, out, err = atoll(*shlex.split(line), home=served.home, cwd=place)
    assert code == 0, err
    return out


def test_the_page_is_a_life_of_a_run(tmp_path: Path) -> None:
    """Joined, looked at, controlled, stopped, taken away and gone on with.

    The island that the page has on another machine is one of this machine's.
    """
    (tmp_path / "train.py").write_text(ISLAND)
    (tmp_path / "next.toml").write_text('[run]\nname = "next"\n')
    options = ("--set", "run.start_islands=1", "--set", "run.end_rounds=100000")
    with serving(tmp_path, *options) as served:
        ask(served, tmp_path, "invite lagoon")
        (join,) = [line for line in COMMANDS if line.startswith("join lagoon ")]
        island = started(*shlex.split(join), home=served.home, cwd=tmp_path)
        events = started("events", "lagoon", "--follow", "--json", home=served.home)
        with events:
            assert events.stdout is not None
            for line in events.stdout:
                if json.loads(line)["event"] == "round_committed":
                    break
            events.kill()
        for line in (
            *("status lagoon", "status lagoon --json", "events lagoon"),
            *("doctor lagoon", "control lagoon pause", "control lagoon resume"),
            "control lagoon set outer.lr=0.5",
        ):
            ask(served, tmp_path, line)
        ask(served, tmp_path, "control lagoon stop")
        code, out, err = ended(island)
        assert code == 0, err
        assert out.startswith("tokyo-1 ")
        ask(served, tmp_path, "export lagoon weights.safetensors")
        (again,) = [line for line in COMMANDS if "--init" in line]
        _begin_and_stop(shlex.split(again), served.home, tmp_path)


def _begin_and_stop(words: list[str], home: Path, place: Path) -> None:
    process = started(*words, home=home, cwd=place)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("run            next-")
    process.terminate()
    code, _, err = ended(process)
    assert code == 0, err
    assert (place / "next.atoll").is_dir()
