"""The public kit for tests: its names, its page, and loops in virtual time."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import atoll.testing
from atoll import RunSettings
from atoll.errors import UsageError
from atoll.simulate.plan import FaultMethod
from atoll.testing import (
    DISK_CLAIMS,
    EXCHANGE_CLAIMS,
    FaultPlan,
    VectorView,
    VirtualIsland,
    random_plan,
    vector_model,
    virtual_run,
)

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
MODEL = vector_model({"w": (8,)})
SETTINGS = RunSettings.from_dict(
    {"run": {"start_islands": 2, "end_rounds": 4}, "sync": {"sync_every": 6}}
)


def loop(island: VirtualIsland) -> tuple[str, int]:
    """Train until the run ends, and return the digest and which life saw it."""
    weights = VectorView(fill=1.0)
    host = island.join(MODEL, weights)
    while not host.has_ended:
        island.work(0.5)
        weights.local[0] -= 0.1 * weights.local[0]
        host.stepped()
    host.leave()
    return host.digest, island.incarnation


def run_python(code: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_kit_lists_its_names() -> None:
    """Every name is there, and a misspelt one is an attribute error."""
    assert len(set(atoll.testing.__all__)) == len(atoll.testing.__all__)
    for name in atoll.testing.__all__:
        assert getattr(atoll.testing, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'FaultPlna'"):
        _ = atoll.testing.FaultPlna  # type: ignore[attr-defined]


def test_the_contracts_need_neither_virtual_time_nor_a_framework() -> None:
    """Importing the kit loads no greenlet, no torch and no pytest."""
    code = "import sys, atoll.testing\nprint(*sys.modules)"
    loaded = set(run_python(code).split())

    assert loaded & {"greenlet", "torch", "jax", "pytest", "atoll.simulate"} == set()


@pytest.mark.parametrize("claims", [DISK_CLAIMS, EXCHANGE_CLAIMS])
def test_every_claim_of_a_file_is_in_its_contract(claims: tuple[object, ...]) -> None:
    """A claim that was written and not listed would be run by nobody."""
    module = inspect.getmodule(claims[0])
    assert module is not None
    written = [
        each
        for name, each in vars(module).items()
        if inspect.isfunction(each)
        and each.__module__ == module.__name__
        and not name.startswith("_")
    ]

    assert written == list(claims)
    assert all(inspect.getdoc(claim) for claim in claims)


def test_a_loop_is_called_once_for_each_life() -> None:
    """An island that dies and returns is in its second life at the end."""
    plan = FaultPlan().kill("i1", at_s=4.0, back_after_s=2.0)
    result = virtual_run(loop, SETTINGS, islands=2, faults=plan)

    assert result.rounds == (4,)
    (first, one), (second, two) = result.returned["i0"], result.returned["i1"]
    assert first == second
    assert (one, two) == (1, 2)


def test_the_same_seed_gives_the_same_virtual_run() -> None:
    """And another seed another one."""
    plan = random_plan(5, ["i0", "i1"], span_s=10.0)
    runs = [virtual_run(loop, SETTINGS, islands=2, faults=plan) for _ in range(2)]

    assert runs[0] == runs[1]
    assert runs[0] != virtual_run(loop, SETTINGS, islands=2, faults=plan, seed=1)


def test_an_error_of_atoll_ends_its_island_only() -> None:
    """The others see the end; what went wrong is in the failures."""

    def gives_up(island: VirtualIsland) -> tuple[str, int]:
        if island.name == "i2":
            raise UsageError("This island has no data. Give it some.")
        return loop(island)

    result = virtual_run(gives_up, SETTINGS, islands=3)

    assert list(result.failures) == ["i2"]
    assert sorted(result.returned) == ["i0", "i1"]


def test_the_page_names_every_fault() -> None:
    """A table lists the methods of a plan that add a fault, each once."""
    section = PAGE.read_text().partition("## Fault plans")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    methods = {
        name
        for name, each in vars(FaultPlan).items()
        if isinstance(each, FaultMethod) or inspect.isfunction(each)
        if not name.startswith("_")
    }

    assert sorted(listed) == sorted(methods - {"adding", "to_toml"})


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    """Put together, the examples are a test file that passes."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    file = tmp_path / "test_page.py"
    file.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert len(blocks) == 9
    assert done.returncode == 0, done.stdout
