"""The last connection of an island's life is told from the others."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.coordinator.app import MAX_PER_INCARNATION, Connections

A1, A2 = ("a", 1), ("a", 2)


@dataclass
class Connection:
    """Something to write a name on."""

    tag: object = None
    is_open: bool = True

    def abort(self) -> None:
        self.is_open = False


def test_the_last_of_several_is_the_last() -> None:
    """However often each of them has spoken."""
    known, first, second = Connections(), Connection(), Connection()
    for each in (first, second, first, second):
        known.heard(each, A1)

    first.is_open = False
    assert not known.closed(A1)
    second.is_open = False
    assert known.closed(A1)


def test_a_connection_that_changes_hands_counts_once() -> None:
    """A new life that speaks on an old connection leaves none to the old one."""
    known, shared, own = Connections(), Connection(), Connection()
    known.heard(shared, A1)
    known.heard(own, A1)
    known.heard(shared, A2)

    own.is_open = False
    assert known.closed(A1)
    shared.is_open = False
    assert known.closed(A2)


def test_one_that_we_have_closed_ourselves_is_not_waited_for() -> None:
    """An idle one was dropped, and nobody told of it: the other is the last."""
    known, idle, busy = Connections(), Connection(), Connection()
    known.heard(idle, A1)
    known.heard(busy, A1)
    idle.is_open = False

    busy.is_open = False
    assert known.closed(A1)


def test_an_island_has_so_many_connections_and_no_more() -> None:
    """One more ends the oldest, and only that one."""
    known = Connections()
    connections = [Connection() for _ in range(MAX_PER_INCARNATION + 1)]
    for each in connections:
        known.heard(each, A1)

    assert [each.is_open for each in connections] == [False] + [
        True
    ] * MAX_PER_INCARNATION
