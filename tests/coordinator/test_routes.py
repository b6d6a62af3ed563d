"""Each row of the table of routes is handled by the method of its name."""

from __future__ import annotations

import inspect

from atoll.coordinator.operators import Operators
from atoll.coordinator.routes import Routes
from atoll.routes import ROUTE, ROUTES


def test_every_route_has_one_handler() -> None:
    """A route is a row and a method: nothing else lists it."""
    owners = {
        name: [owner for owner in (Routes, Operators) if hasattr(owner, name)]
        for name in ROUTE
    }

    assert [name for name, found in owners.items() if len(found) != 1] == []
    assert len(ROUTE) == len(ROUTES)


def test_every_handler_takes_the_request_and_its_head() -> None:
    """The table calls all of them alike."""
    for name in ROUTE:
        handler = getattr(Routes, name, None) or getattr(Operators, name)
        assert list(inspect.signature(handler).parameters) == [
            "self",
            "request",
            "head",
        ]
