"""Each row of the table of routes is handled by the method of its name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from atoll.coordinator.operators import Operators
from atoll.coordinator.routes import Routes
from atoll.http.request import parse_target
from atoll.routes import ROUTE, ROUTES, UNLISTED, find_route
from tests.style.tree import python_files


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


def literal(node: ast.expr) -> str | None:
    """Return the text of a literal, with `1` for each value in an f-string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "1" for part in node.values)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else None  # type: ignore[attr-defined]


def targets() -> Iterator[tuple[str, str]]:
    """Yield method and target of each literal request in the source."""
    for file in python_files("src"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "attr", "")
            texts = [literal(argument) for argument in node.args]
            if name in ("get", "post") and (texts[0] or "").startswith("/"):
                yield name.upper(), str(texts[0])
            if name == "call" and len(texts) > 1 and (texts[1] or "").startswith("/"):
                yield str(texts[0]), str(texts[1])


def test_every_request_in_the_source_has_its_row() -> None:
    """A client asks for nothing that the table does not list, and with its query."""
    requests = list(targets())
    for method, target in requests:
        segments, query = parse_target(target, max_path_bytes=2048)
        route = find_route(method, segments).route

        assert route is not UNLISTED, (method, target)
        assert query.keys() <= route.query, (method, target)
    assert ("GET", "/status") in requests
