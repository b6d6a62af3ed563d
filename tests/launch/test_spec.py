"""What an island is to be, and what it cannot be."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from atoll.errors import CorruptError, UsageError
from atoll.launch.base import Report, State
from atoll.launch.spec import (
    IslandSpec,
    Resources,
    Restarts,
    full_argv,
    spec_from_form,
    spec_to_form,
)
from atoll.settings import RunSettings


def spec(**more: Any) -> IslandSpec:
    given: dict[str, Any] = {"command": ("train.py",), "run": "/runs/a", "name": "a"}
    return IslandSpec(**given | more)


def test_a_spec_has_no_place_for_settings() -> None:
    """No field of a spec is called as a table or a key of a run file."""
    tables = RunSettings.from_dict({}).to_dict()
    keys = {key for table in tables.values() for key in table} - {"name"}

    assert {each.name for each in fields(IslandSpec)} & (keys | tables.keys()) == {
        "run"  # its address, not its table
    }


@pytest.mark.parametrize(
    ("command", "processes", "words"),
    [
        (["train.py", "--lr", "1"], 1, ["PY", "train.py", "--lr", "1"]),
        (["-m", "pack.train"], 1, ["PY", "-m", "pack.train"]),
        (["python", "train.py"], 1, ["PY", "train.py"]),
        (["python3", "-c", "1"], 1, ["PY", "-c", "1"]),
        (["pack.train:main", "x"], 1, ["PY", "-m", "CALL", "pack.train:main", "x"]),
        (["./program", "x.py"], 1, ["./program", "x.py"]),
        (["train.py"], 2, ["PY", "RUN", "--nproc-per-node=2", "train.py"]),
        (["-m", "pack"], 2, ["PY", "RUN", "--nproc-per-node=2", "-m", "pack"]),
    ],
)
def test_commands_are_spelt_out(
    command: list[str], processes: int, words: list[str]
) -> None:
    """Scripts, modules and functions are run by the Python of the island's place."""
    said = full_argv(command, processes=processes, python="PY")
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    short = " ".join(said).replace(" ".join(torchrun), "RUN")

    assert short.replace("atoll.launch.function_command", "CALL").split() == words


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"command": ()}, "There is no command"),
        ({"command": ("a\0b",)}, "zero byte"),
        ({"command": ("x",) * 1025}, "1025 words"),
        ({"processes": 0}, "processes=0"),
        ({"command": ("./a",), "processes": 2}, "'./a' is a program"),
        ({"name": "Lagoon"}, "'Lagoon' cannot begin the names"),
        ({"name": "a" * 41}, "at most 40"),
        ({"run": ""}, "No run was given"),
        ({"environment": {"a b": "1"}}, "'a b' is no name"),
        ({"environment": {"ATOLL_SYNC_EVERY": "5"}}, "the run owns its settings"),
        ({"environment": {"HF_TOKEN": "x"}}, "--secret HF_TOKEN=env:HF_TOKEN"),
        ({"environment": {"AWS_SECRET_ACCESS_KEY": "x"}}, "looks like a secret"),
        ({"secrets": {"A": "hush"}}, "no reference. Write A=env:NAME"),
        (
            {"secrets": {"A": "env:A"}, "environment": {"A": "1"}},
            "A is given as a secret and in the open",
        ),
        ({"image": "i", "requirements": ("torch",)}, "exclude each other"),
        ({"code": "abc"}, "no digest"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    given: dict[str, Any], message: str
) -> None:
    """Before any engine is asked, with what is wrong."""
    with pytest.raises(UsageError, match=message):
        spec(**given)


def test_a_wrong_reference_is_not_shown() -> None:
    """It may be the secret itself, pasted by mistake."""
    with pytest.raises(UsageError) as caught:
        spec(secrets={"A": "hush-hush"})

    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cpus": 0.0}, "cpus=0.0 must be above 0"),
        ({"memory_bytes": -1}, "memory_bytes=-1"),
        ({"accelerators": -1}, "less than none"),
        ({"accelerator": "a100"}, "Say how many"),
        ({"time_limit_s": float("inf")}, "time_limit_s=inf"),
    ],
)
def test_impossible_resources_are_refused(given: dict[str, Any], message: str) -> None:
    """Nothing runs on nothing."""
    with pytest.raises(UsageError, match=message):
        Resources(**given)


def test_impossible_restarts_are_refused() -> None:
    """A policy that could not be followed is told."""
    with pytest.raises(UsageError, match="max_restarts=-1"):
        Restarts(max_restarts=-1)
    with pytest.raises(UsageError, match="first_pause_s=9"):
        Restarts(first_pause_s=9.0, longest_pause_s=1.0)


def test_a_report_is_stored_under_its_first_names() -> None:
    """A supervisor's file of an earlier launch is read, and its bytes do not change."""
    report = Report(
        index=1, name="a-1", state=State.FAILED, exit_code=3, reason="r", host="n2"
    )
    stored = {"index": 1, "name": "a-1", "state": "failed", "restarts": 0}
    stored |= {"exit_code": 3, "why": "r", "place": "n2"}

    assert list(report.to_dict().items()) == list(stored.items())
    assert Report.from_dict(stored) == report


def test_restarts_are_stored_under_their_first_names() -> None:
    """An earlier launch is scaled with its policy, and its bytes do not change."""
    restarts = Restarts(max_restarts=5, crash_window_s=2.0, max_crashes=4)
    stored = {"most": 5, "first_pause_s": 1.0, "longest_pause_s": 60.0}
    stored |= {"at_once_s": 2.0, "most_at_once": 4}

    assert list(restarts.to_dict().items()) == list(stored.items())
    assert Restarts.from_dict(stored) == restarts
    assert spec_to_form(spec(restarts=restarts))["restarts"] == stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"processes": True}, "spec.processes=True must be a whole number"),
        ({"secrets": {"C": 1}}, "spec.secrets.C=1 must be text"),
        ({"command": "train.py"}, "spec.command='train.py' must be a list"),
        ({"restarts": {"most": "5"}}, "spec.restarts.most='5' must be a whole number"),
        ({"resources": {}}, "spec.resources.accelerator is missing"),
        ({"colour": "red"}, "spec.'colour' is unknown here"),
        ({"processes": 0}, "processes=0: an island has 1 or more"),
    ],
)
def test_a_damaged_spec_is_refused(change: dict[str, Any], message: str) -> None:
    """A stored launch is read by the same rules as settings and documents."""
    form = json.loads(json.dumps(spec_to_form(spec())))

    assert spec_from_form(form) == spec()
    with pytest.raises(CorruptError, match=message):
        spec_from_form(form | change)
