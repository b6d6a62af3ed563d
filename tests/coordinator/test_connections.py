"""The last connection of an island's life is told from the others."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.coordinator.connections import Connections


@dataclass
class Connection:
    """Something to write a name on."""

    tag: object = None


def test_the_last_of_several_is_the_last() -> None:
    """However often each of them has spoken."""
    known, first, second = Connections(), Connection(), Connection()
    for each in (first, second, first, second):
        known.heard(each, ("a", 1))

    assert not known.closed(("a", 1))
    assert known.closed(("a", 1))


def test_a_connection_that_changes_hands_counts_once() -> None:
    """A new life that speaks on an old connection leaves none to the old one."""
    known, shared, own = Connections(), Connection(), Connection()
    known.heard(shared, ("a", 1))
    known.heard(own, ("a", 1))
    known.heard(shared, ("a", 2))

    assert known.closed(("a", 1))
    assert known.closed(("a", 2))
