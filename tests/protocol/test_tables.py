"""The tables of the protocol: whole, true to the machines, and on their page."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from atoll.exchange.calls import Call
from atoll.protocol import Action, Event, WorkDecision
from atoll.protocol.coordinator import HANDLERS
from atoll.protocol.rounds import Phase, Reception
from atoll.protocol.tables import (
    RECEPTION,
    TRANSITIONS,
    WORK,
    DecisionRow,
    DecisionTable,
)
from tests.protocol.call_tables import CALLS
from tests.protocol.drivers import Driver
from tests.protocol.event_tables import EVENTS
from tests.protocol.island_tables import SAID
from tests.protocol.render import COMMAND, DECISIONS, PAGE, TYPES, rendered, titles

EACH_TABLE = pytest.mark.parametrize(
    ("table", "driver"), DECISIONS, ids=[table.title for table, _ in DECISIONS]
)


def named(table: DecisionTable) -> set[str]:
    """Return what stands before the comma in the values of the first column."""
    return {value.partition(",")[0] for value in next(iter(table.columns.values()))}


@EACH_TABLE
def test_the_machine_does_what_the_table_says(
    table: DecisionTable, driver: Driver
) -> None:
    """Every combination of a table is put to the real machine, and none differs."""
    differing = {
        values: (table[values], answer)
        for values in table.combinations()
        if (answer := driver(*values)) != table[values]
    }

    assert differing == {}, "combination: (the table, the machine)"


@EACH_TABLE
def test_no_row_is_idle(table: DecisionTable, driver: Driver) -> None:
    """Each row decides something, and every combination is decided by one."""
    deciding = {table.row(values) for values in table.combinations()}

    assert [row for row in table.rows if row not in deciding] == []


@EACH_TABLE
def test_cells_are_values_of_their_column(table: DecisionTable, driver: Driver) -> None:
    """A misspelt cell would silently fit nothing."""
    for row in table.rows:
        for cell, values in zip(row.when, table.columns.values(), strict=True):
            assert cell == "any" or set(cell.split(" or ")) <= set(values), row


def test_a_combination_without_a_row_is_an_error() -> None:
    """A table with a hole does not answer with somebody else's row."""
    rows = (DecisionRow(("x",), "then", "why"),)
    table = DecisionTable(
        title="small", columns={"c": ("x", "y")}, answer="a", rows=rows
    )

    with pytest.raises(LookupError, match=r"No row of 'small' fits \('y',\)"):
        table["x",]


def test_every_phase_and_answer_is_in_a_table() -> None:
    """No phase, reception or fate of work exists beside the tables."""
    answers = {row.then for row in TRANSITIONS.rows} - {"impossible"}
    assert answers == set(Phase) == set(TRANSITIONS.columns["phase"])
    assert {row.then for row in RECEPTION.rows} == {*Reception, "refused"}
    assert {row.then for row in WORK.rows} == set(WorkDecision)


def test_every_event_action_and_call_is_in_a_table() -> None:
    """What the machines and the port know, the tables name."""
    assert named(EVENTS) == {event.__name__ for event in HANDLERS}
    assert named(CALLS) == {call.__name__ for call in get_args(Call)}
    assert named(CALLS) == set(TYPES["Calls"][1])
    assert SAID.keys() == set(get_args(Action))
    drawn = PAGE.read_text()
    for event in get_args(Event):
        assert event.__name__ in drawn


def test_the_page_shows_every_table() -> None:
    """Each table has its place in docs/protocol.md, once."""
    marked = re.findall(r"<!-- table: (.*?) -->", PAGE.read_text())

    assert sorted(marked) == sorted(titles())


def test_the_page_is_what_the_tables_render_to() -> None:
    """Nobody edits a table on the page, or forgets to write it anew."""
    page = PAGE.read_text()

    assert rendered(page) == page, f"run `{COMMAND}` to write the tables anew"
