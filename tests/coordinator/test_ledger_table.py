"""The ledger of rows as a table: from a journal, a coordinator and a directory."""

from __future__ import annotations

import csv
import io
from contextlib import ExitStack, closing
from pathlib import Path

from atoll.coordinator.rows import COLUMNS, LedgerTable
from atoll.data import Ask, DataSpec, Spans
from atoll.run_client.directory import DirectoryRunClient
from atoll.testing.dealer_contract import dealing_settings
from atoll.testing.fixtures import enter, plain_settings, update_of
from atoll.testing.fixtures import roster_of as committed_roster
from atoll.wire import TrainingProgress
from tests.coordinator.serving import Islands, asking, serving
from tests.coordinator.test_row_status import a_pass_with_everything
from tests.coordinator.test_rows import claim, ledger_of, make, with_rows
from tests.data.test_ledger import roster_of


def rows_of(table: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table.decode())))


def test_each_turn_of_an_update_has_a_line() -> None:
    """Lines tell the turns, their state now, the round and the island."""
    service, _, joined = make()
    spans = claim(service, joined["a"], 1).spans
    service.handle(with_rows(service, joined["a"], spans.head(7)), 1.0)
    service.handle(with_rows(service, joined["b"], spans), 1.0)  # refused
    rosters = service.journal.recorded.rosters
    table = LedgerTable(ledger_of(service))
    lines = b"".join(table.lines((*key, rosters[key]) for key in sorted(rosters)))

    head, *rows = csv.reader(io.StringIO(lines.decode()))
    assert tuple(head) == COLUMNS
    assert rows == [
        ["0", "7", "trained", "0", "1", "a", "1", "counted"],
        ["0", "7", "trained", "0", "1", "b", "1", "refused"],
        ["7", "10", "in hand", "0", "1", "b", "1", "refused"],
    ]


def test_every_state_has_its_name() -> None:
    """A turn is trained, partly trained, refused, in hand or free."""
    table = LedgerTable(a_pass_with_everything())
    roster = roster_of({"a": Spans([(0, 1000)])})

    lines = rows_of(b"".join(table.lines([(0, 1, roster)])))

    by_state: dict[str, int] = {}
    for line in lines:
        length = int(line["end_turn"]) - int(line["first_turn"])
        by_state[line["state"]] = by_state.get(line["state"], 0) + length
    assert by_state == {
        "trained": 150,
        "partly": 12,
        "refused": 20,
        "in hand": 230,
        "free": 588,
    }


def test_a_name_with_a_comma_is_one_value() -> None:
    """Names come from other machines, and stay in their column."""
    table = LedgerTable(a_pass_with_everything())
    roster = roster_of({'a,"b"': Spans([(0, 1)])})

    (line,) = rows_of(b"".join(table.lines([(0, 1, roster)])))

    assert line["island"] == 'a,"b"'


def test_a_coordinator_sends_the_table(tmp_path: Path) -> None:
    """Anyone with an island's token reads it, and the directory has the same later."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(
            serving(tmp_path / "run", dealing_settings(start_islands=1))
        )
        exchange = Islands(coordinator, stack)(key=b"a")
        joined = enter(exchange, "a,b")
        exchange.open_data("a,b", joined.incarnation, DataSpec(rows=45))
        ask = Ask(island="a,b", incarnation=joined.incarnation, number=1)
        spans = exchange.claim(ask).spans
        progress = TrainingProgress(inner_steps=1, tokens=0, cursor=spans.pack())
        exchange.publish(update_of(exchange, joined, 1.0, progress=progress))
        committed_roster(exchange, 1)
        heard = asking(coordinator, "GET /data/ledger")

    assert heard.status == 200
    assert heard.headers["content-type"] == "text/csv"
    assert rows_of(heard.body) == [
        {
            "first_turn": "0",
            "end_turn": "10",
            "state": "trained",
            "fragment": "0",
            "round": "1",
            "island": "a,b",
            "incarnation": "1",
            "verdict": "counted",
        }
    ]
    with closing(DirectoryRunClient(tmp_path / "run")) as client:
        size_bytes = client.export_ledger(tmp_path / "ledger.csv")
    assert (tmp_path / "ledger.csv").read_bytes() == heard.body
    assert size_bytes == len(heard.body)


def test_a_run_that_cuts_its_data_has_no_table(tmp_path: Path) -> None:
    """The refusal names the setting."""
    with serving(tmp_path / "run", plain_settings()) as coordinator:
        heard = asking(coordinator, "GET /data/ledger")

    assert heard.status == 409
    assert b"The run has no ledger of rows: data.order is 'islands'" in heard.body
