"""`python -m tests.protocol.render`: write the tables of docs/protocol.md anew.

The page is written by hand but for what stands between a table's marks, which names
the table that belongs there.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from atoll.exchange import calls
from atoll.protocol import events, messages
from atoll.protocol.tables import (
    ANY,
    FOUNDING,
    JOINING,
    RECEPTION,
    REJOINING,
    TRANSITIONS,
    WORK,
)
from atoll.protocol.tables import DecisionTable as Decision
from tests.protocol.call_tables import CALLS, answered
from tests.protocol.drivers import (
    Driver,
    next_phase,
    reception,
    what_becomes,
    what_remains,
    who_founds,
    whose_name,
)
from tests.protocol.event_tables import EVENTS, FENCES, may_speak, what_it_does
from tests.protocol.island_tables import (
    ARRIVALS,
    BOOKS,
    SUMMONS,
    after_the_outcome,
    what_follows,
    when_summoned,
)

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
COMMAND = "python -m tests.protocol.render"

DECISIONS: tuple[tuple[Decision, Driver], ...] = (
    (TRANSITIONS, next_phase),
    (RECEPTION, reception),
    (JOINING, whose_name),
    (FOUNDING, who_founds),
    (FENCES, may_speak),
    (EVENTS, what_it_does),
    (WORK, what_becomes),
    (REJOINING, what_remains),
    (BOOKS, what_follows),
    (ARRIVALS, after_the_outcome),
    (SUMMONS, when_summoned),
    (CALLS, answered),
)
"""Every table of decisions, with what puts a combination to the real machine."""

TYPES = {
    "Calls": (
        calls,
        (
            "JoinCall",
            "KeepCall",
            "FoundCall",
            "RecoverCall",
            "HeartbeatCall",
            "OfferCall",
            "PublishCall",
            "AgreedCall",
            "OutcomeCall",
            "StateCall",
            "DataCall",
            "ClaimCall",
            "LeaveCall",
        ),
    ),
    "Messages": (
        messages,
        ("JoinRequest", "JoinReply", "Position", "Heartbeat", "HeldRound"),
    ),
    "Actions": (events, ("Welcome", "Persist", "Respond", "CloseRound")),
}
"""Types whose fields the page lists, as the code has them."""


def rendered(text: str) -> str:
    """Return a page with every table as the code has it."""
    tables = {table.title: as_markdown(table) for table, _ in DECISIONS}
    tables |= {title: fields_of(*each) for title, each in TYPES.items()}

    def put(mark: re.Match[str]) -> str:
        return f"<!-- table: {mark[1]} -->\n{tables[mark[1]]}<!-- end -->"

    return re.sub(r"<!-- table: (.*?) -->\n.*?<!-- end -->", put, text, flags=re.DOTALL)


def titles() -> set[str]:
    """Return the titles of all tables that the page must show."""
    return {table.title for table, _ in DECISIONS} | TYPES.keys()


def as_markdown(table: Decision) -> str:
    """Return a table of decisions; an empty cell fits every value."""
    lines = [_line([*table.columns, f"**{table.answer}**", "why"])]
    lines.append(_line(["---"] * (len(table.columns) + 2)))
    for row in table.rows:
        cells = ["" if cell == ANY else cell for cell in row.when]
        lines.append(_line([*cells, f"**`{row.then}`**", row.reason]))
    return "".join(lines)


def fields_of(module: object, names: tuple[str, ...]) -> str:
    """Return the fields of types, with what their docstrings say."""
    tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    classes = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
    lines = [_line(["type", "field", "is a", "meaning"]), _line(["---"] * 4)]
    for name in names:
        first = ast.get_docstring(classes[name]) or ""
        lines.append(_line([f"`{name}`", "", "", first.splitlines()[0]]))
        for field, kind, meaning in _fields(classes[name]):
            kind = kind.replace("|", "\\|")
            lines.append(_line(["", f"`{field}`", f"`{kind}`", meaning]))
    return "".join(lines)


def _fields(owner: ast.ClassDef) -> list[tuple[str, str, str]]:
    """Return name, type and docstring of each field."""
    fields = []
    for each, after in zip(owner.body, [*owner.body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign):
            is_said = isinstance(after, ast.Expr) and isinstance(
                after.value, ast.Constant
            )
            said = str(after.value.value) if is_said else ""  # type: ignore[union-attr]
            kind = ast.unparse(each.annotation)
            fields.append((ast.unparse(each.target), kind, " ".join(said.split())))
    return fields


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
