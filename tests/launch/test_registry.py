"""Engines are found by name, and what one lacks is told before anything is launched."""

from __future__ import annotations

import ast
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.errors import UsageError
from atoll.launch import engines
from atoll.launch.base import read_options
from atoll.launch.registry import engine_names, open_launcher

ROOT = Path(__file__).parents[2]
OF_ENGINES = {
    "boto3": "sagemaker",
    "botocore": "sagemaker",
    "huggingface_hub": "hf_jobs",
    "kubernetes": "kubernetes",
    "modal": "modal",
    "ray": "ray",
    "sky": "skypilot",
}


def test_an_unknown_engine_names_the_nearest() -> None:
    """A misspelt name is answered with the one that was meant."""
    with pytest.raises(UsageError, match=r"no engine 'locl'. Did you mean 'local'\?"):
        open_launcher("locl")


def test_a_missing_sdk_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for an engine without its SDK is told what to install."""
    (tmp_path / "far_away.py").write_text("import an_sdk_that_is_not_here\n")
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match=r"needs an_sdk_that_is_not_here.*\[far-away"):
        open_launcher("far-away")

    assert "far_away" in engine_names()
    assert "atoll.launch.engines.far_away" not in sys.modules


def test_an_sdk_has_one_home() -> None:
    """Only the module of its engine imports an SDK."""
    strangers = []
    for file in (ROOT / "src" / "atoll").rglob("*.py"):
        for top in _imported(file) & OF_ENGINES.keys():
            home = ROOT / "src" / "atoll" / "launch" / "engines" / OF_ENGINES[top]
            if file != home.with_suffix(".py") and home not in file.parents:
                strangers.append(f"{file.name} imports {top}")

    assert strangers == []


def _imported(file: Path) -> set[str]:
    found = set()
    for each in ast.walk(ast.parse(file.read_text())):
        if isinstance(each, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in each.names}
        elif isinstance(each, ast.ImportFrom) and each.module:
            found.add(each.module.partition(".")[0])
    return found


@dataclass(frozen=True)
class Words:
    partition: str | None = None
    cores: int = 1
    share: float = 0.5
    is_exclusive: bool = False


def test_options_are_read_by_their_kinds() -> None:
    """What was not given has its default."""
    given = {"partition": "7", "cores": "7", "is_exclusive": "true"}

    assert read_options(Words, given, engine="slurm") == Words("7", 7, 0.5, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"particion": "a"}, "slurm has no option 'particion'. .*'partition'"),
        ({"cores": "two"}, "cores='two' is not a whole number"),
        ({"share": "x"}, "share='x' is not a number"),
        ({"is_exclusive": "1"}, "is not true or false"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, str], message: str) -> None:
    """An option that would not be heeded is an error."""
    with pytest.raises(UsageError, match=message):
        read_options(Words, given, engine="slurm")
