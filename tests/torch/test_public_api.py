"""The names that users rely on: changing one is changing a promise."""

from __future__ import annotations

import inspect

import pytest

import atoll.torch
from atoll.torch import Island, build, from_run, join, shard

pytestmark = pytest.mark.torch


def test_the_package_lists_its_names() -> None:
    """What a user can import is exactly what `__all__` says."""
    assert atoll.torch.__all__ == [
        "WSD",
        "Evaluation",
        "Island",
        "Stage",
        "StoreAllReduce",
        "build",
        "from_run",
        "join",
        "shard",
    ]
    assert all(hasattr(atoll.torch, name) for name in atoll.torch.__all__)


def parameters(function: object) -> list[str]:
    """Return each parameter as a caller sees it: its kind, name and default."""
    assert callable(function)
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        kind = {"KEYWORD_ONLY": "*, ", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        default = parameter.default
        value = "" if default is parameter.empty else f"={default!r}"
        shown.append(f"{kind}{parameter.name}{value}")
    return shown


def test_join_takes_what_was_promised() -> None:
    """A model, an optimizer, a run; the rest by name."""
    assert parameters(join) == [
        "model",
        "optimizer",
        "run=None",
        "*, island=None",
        "*, on_end='raise'",
        "*, count='hook'",
        "*, checkpoint=None",
    ]
    assert inspect.signature(join).return_annotation == "Island"


def test_build_takes_what_was_promised() -> None:
    """What makes a model, and where its values come from."""
    assert parameters(build) == [
        "make_model",
        "run=None",
        "*, device='cpu'",
        "*, source=None",
        "*, checkpoint=None",
        "*, initialise=None",
    ]


def test_from_run_takes_what_was_promised() -> None:
    """A run, and what `build` takes besides what makes the model."""
    assert parameters(from_run) == [
        "run=None",
        "*, device='cpu'",
        "*, prepare=None",
        "*, source=None",
        "*, checkpoint=None",
        "*, initialise=None",
    ]


def test_shard_takes_data_and_an_island() -> None:
    """Nothing else must match between islands."""
    assert parameters(shard) == ["data", "island"]


def test_wsd_takes_what_was_promised() -> None:
    """An optimizer and an island; how long each phase is by name."""
    assert parameters(atoll.torch.WSD) == [
        "optimizer",
        "island",
        "*, warmup",
        "*, decay=0",
        "*, unit='inner_steps'",
        "*, rewarm_steps=20",
    ]


def test_an_island_offers_what_was_promised() -> None:
    """Every public member is one that the documents name."""
    public = {name for name in dir(Island) if not name.startswith("_")}

    assert public == {
        "anchor",
        "deal",
        "digest",
        "ended",
        "evaluating",
        "inner_steps",
        "leave",
        "metrics",
        "name",
        "on_save",
        "place",
        "report",
        "round",
        "run_steps",
        "run_tokens",
        "seed",
        "settings",
        "should_stop",
        "slot",
        "stepped",
        "sync_now",
    }
    properties = {n for n in public if isinstance(getattr(Island, n), property)}
    assert public - properties == {
        "anchor",
        "deal",
        "evaluating",
        "leave",
        "metrics",
        "on_save",
        "report",
        "stepped",
        "sync_now",
    }


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Island.report, ["*, tokens=0", "*, loss=None", "**metrics"]),
        (Island.anchor, []),
        (Island.deal, ["data"]),
        (Island.evaluating, []),
        (Island.leave, []),
        (Island.metrics, []),
        (Island.on_save, ["function"]),
        (Island.stepped, []),
        (Island.sync_now, []),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_islands_methods_take_what_was_promised(
    method: object, expected: list[str]
) -> None:
    """Signatures are part of the promise."""
    assert parameters(method) == ["self", *expected]


def test_what_comes_later_is_absent_rather_than_empty() -> None:
    """A name that is there works; these come with their capabilities."""
    assert not hasattr(atoll.torch, "diloco")
