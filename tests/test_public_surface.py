"""The public surface: few names, usual parameter names, and two depths of import."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import atoll.exchange

ROOT = Path(__file__).parents[1]
SHOWN = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")]
)
INTEGRATION = r"atoll\.integrations\.\w+"
"""An integration is a package of its own, below the package of all integrations."""

VAGUE = {"also", "at", "dir", "most", "of", "place", "why", "word"}


def public_callables(package: str) -> Iterator[tuple[str, object]]:
    """Yield the public functions, classes and methods of a package, by name."""
    module = importlib.import_module(package)
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isclass(found):
            members = inspect.getmembers(found, inspect.isroutine)
            yield from (
                (f"{name}.{method}", function)
                for method, function in members
                if not method.startswith("_") and is_of_atoll(found, method)
            )
        if callable(found):
            yield name, found


def is_of_atoll(kind: type, method: str) -> bool:
    """Return whether a class or its base in the project has a method."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("atoll.")]
    return any(method in vars(base) for base in bases)


@pytest.mark.parametrize(
    "package",
    [
        "atoll.checkpoint",
        "atoll.exchange",
        "atoll.launch",
        "atoll.store",
        pytest.param("atoll.torch", marks=pytest.mark.torch),
        pytest.param("atoll.jax", marks=pytest.mark.jax),
        pytest.param("atoll.integrations.transformers", marks=pytest.mark.torch),
        pytest.param("atoll.integrations.lightning", marks=pytest.mark.torch),
    ],
)
def test_public_parameters_have_usual_names(package: str) -> None:
    """No function, method or dataclass of the surface has a vague parameter."""
    vague = [
        f"{name}({parameter})"
        for name, found in public_callables(package)
        if callable(found)
        for parameter in inspect.signature(found).parameters
        if parameter in VAGUE
    ]

    assert vague == []


def test_the_exchanges_list_their_names() -> None:
    """The surface is the runs, the port and its values; messages are internal."""
    assert atoll.exchange.__all__ == [
        "CollectiveRun",
        "CoordinatorExchange",
        "Exchange",
        "Frame",
        "MemoryRun",
        "Outcome",
    ]
    assert all(hasattr(atoll.exchange, name) for name in atoll.exchange.__all__)


def test_a_misspelt_exchange_is_an_attribute_error() -> None:
    """The lazy name does not hide a misspelt one."""
    with pytest.raises(AttributeError, match=r"has no attribute 'ColectiveRun'"):
        _ = atoll.exchange.ColectiveRun  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_documents_and_examples_import_packages_only(path: Path) -> None:
    """Documents and examples import `atoll.<package>`, never a file inside one."""
    imported = re.findall(r"^\s*(?:from|import) (atoll[\w.]*)", path.read_text(), re.M)
    too_deep = [
        module
        for module in imported
        if module.count(".") > 1 and not re.fullmatch(INTEGRATION, module)
    ]

    assert too_deep == []
