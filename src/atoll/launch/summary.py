"""What became of a launch, for people: values in, lines out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from atoll.launch.states import Report, State

LAST_LINES = 12
MAX_NAMES = 8
BAD = (State.FAILED, State.LOST)


def failures(
    reports: Sequence[Report], last_lines: Callable[[Report], Sequence[str]]
) -> Iterator[str]:
    """Yield which islands failed, by cause, with the last words of each.

    Islands that ended with the same words are told once.
    """
    by_cause: dict[tuple[State, str], list[Report]] = defaultdict(list)
    for each in reports:
        if each.state in BAD:
            by_cause[each.state, each.why].append(each)
    for (state, why), those in by_cause.items():
        yield f"{_counted(those)} {state.value}: {why or 'nobody says why'}"
        told: dict[tuple[str, ...], str] = {}
        for each in those:
            said = tuple(last_lines(each)[-LAST_LINES:])
            if said in told:
                yield f"  {each.name}: as {told[said]}"
                continue
            told[said] = each.name
            yield f"  {each.name} said{':' if said else ' nothing'}"
            yield from (f"    {line}" for line in said)


def rows(
    reports: Sequence[Report], metrics: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, ...]]:
    """Return a table of islands, its head first: the same width in every row."""
    head = ("island", "state", "restarts", "round", "loss", "tokens", "place", "why")
    return [head, *(_row(each, metrics.get(each.name, {})) for each in reports)]


def _row(report: Report, said: Mapping[str, Any]) -> tuple[str, ...]:
    loss = said.get("loss")
    return (
        report.name,
        report.state.value,
        str(report.restarts),
        _or_dash(said.get("round")),
        "-" if loss is None else f"{loss:.4g}",
        _or_dash(said.get("tokens")),
        report.place or "-",
        report.why or "-",
    )


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _counted(those: Sequence[Report]) -> str:
    names = ", ".join(each.name for each in those[:MAX_NAMES])
    more = f" and {len(those) - MAX_NAMES} more" if len(those) > MAX_NAMES else ""
    return f"{names}{more}"
