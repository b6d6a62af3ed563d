"""The JAX face is torch's twin: what differs is in one table, and nothing else does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import atoll.jax
import atoll.torch
from atoll.errors import UsageError

pytestmark = [pytest.mark.jax, pytest.mark.torch]

PAGE = Path(__file__).parents[2] / "docs" / "jax-join.md"


def told() -> tuple[str, str]:
    """Return the columns of the table of differences, torch's and JAX's."""
    table = PAGE.read_text().partition("## Differences")[2]
    rows = re.findall(r"^\| (.*?) \| (.*?) \| .* \|$", table, flags=re.MULTILINE)[2:]
    return " ".join(row[0] for row in rows), " ".join(row[1] for row in rows)


def keywords(function: object) -> dict[str, object]:
    """Return the keywords of a function with their defaults."""
    assert callable(function)
    return {
        name: each.default
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_package_lists_its_names() -> None:
    """What a user can import is exactly what `__all__` says."""
    names = atoll.jax.__all__

    assert names == sorted(names)
    assert {"Evaluation", "Island", "join", "restore", "save"} <= set(names)
    assert all(hasattr(atoll.jax, name) for name in names)


def test_join_takes_the_keywords_of_its_twin() -> None:
    """Whatever one takes and the other does not is in the table."""
    ours, theirs = keywords(atoll.jax.join), keywords(atoll.torch.join)
    torch_column, jax_column = told()

    for name in theirs.keys() & ours.keys():
        assert ours[name] == theirs[name], name
    assert {"island", "on_end", "checkpoint"} <= theirs.keys() & ours.keys()
    assert all(f"`join({name}=)`" in torch_column for name in theirs.keys() - ours)
    assert theirs.keys() - ours == {"count"}
    assert ours.keys() - theirs == {"buffers", "frozen", "names"}
    for name in ours.keys() - theirs:
        assert f"{name}=)`" in jax_column, name


def test_join_takes_its_arguments_in_the_order_of_its_twin() -> None:
    """The weights, the optimizer, the run; shared keywords have one order."""
    ours = inspect.signature(atoll.jax.join).parameters
    theirs = inspect.signature(atoll.torch.join).parameters

    assert list(ours)[:3] == ["params", "optimizer", "run"]
    assert list(theirs)[:3] == ["model", "optimizer", "run"]
    assert [name for name in ours if name in theirs] == [
        name for name in theirs if name in ours
    ]
    for name in ("island", "on_end", "checkpoint"):
        assert ours[name].annotation == theirs[name].annotation
        assert ours[name].kind is theirs[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_a_run_in_the_place_of_the_optimizer_is_refused() -> None:
    """A run as the second argument would be taken for the optimizer's state."""
    with pytest.raises(
        UsageError, match=r"optimizer='none' is a run\. Pass the run as"
    ):
        atoll.jax.join({}, "none")


def test_an_island_has_the_members_of_its_twin() -> None:
    """Nothing of a torch island is missing; what there is more is in the table."""
    ours, theirs = public(atoll.jax.Island), public(atoll.torch.Island)
    _, jax_column = told()

    assert theirs - ours == set()
    assert ours - theirs == {"optimizer", "params"}
    assert all(f"`island.{name}`" in jax_column for name in ours - theirs)


@pytest.mark.parametrize(
    "method", ["anchor", "evaluating", "leave", "metrics", "on_save", "report"]
)
def test_methods_take_what_their_twins_take(method: str) -> None:
    """The same call is right for both."""
    ours = getattr(atoll.jax.Island, method)
    theirs = getattr(atoll.torch.Island, method)

    assert list(inspect.signature(ours).parameters) == list(
        inspect.signature(theirs).parameters
    )


@pytest.mark.parametrize("method", ["stepped", "sync_now"])
def test_methods_that_differ_are_in_the_table(method: str) -> None:
    """What is given and returned in JAX is changed in place in torch."""
    _, *given = inspect.signature(getattr(atoll.jax.Island, method)).parameters
    words = [name if at == 0 else f"{name}=" for at, name in enumerate(given)]
    torch_column, jax_column = told()

    assert f"`{method}({', '.join(words)})`" in jax_column
    assert f"`{method}()`" in torch_column


def test_names_of_one_package_alone_are_in_the_table() -> None:
    """A name that only PyTorch needs is said to be absent."""
    torch_column, _ = told()
    for name in set(atoll.torch.__all__) - set(atoll.jax.__all__):
        assert f"`{name}`" in torch_column, name


def test_types_of_a_tree_go_through() -> None:
    """An island of a kind of tree gives and takes that kind."""
    signature = inspect.signature(atoll.jax.join)

    assert signature.return_annotation == "Island[P]"
    assert signature.parameters["params"].annotation == "P"
