"""Which staged updates of a round count: the same answer for every exchange."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from statistics import median

from atoll.wire import Header, Kind, Roster, RosterEntry, Verdict, update_digest

NORMS_FOR_MEDIAN = 3
"""From this many updates on, a norm is judged against the round's median."""


def judge_updates(
    headers: Iterable[Header],
    *,
    base: bytes,
    known_bases: Collection[bytes],
    max_update_norm: float,
) -> Roster:
    """Return the roster of a round whose frozen staged set is `headers`.

    Order of arrival does not matter. A departing update may name any base its
    fragment ever had, because its body does not depend on the anchor.
    """
    staged = sorted(headers, key=lambda header: header.island.encode())
    limit = _norm_limit(staged, max_update_norm)
    return Roster(
        entries=tuple(
            _entry(header, _objection(header, base, known_bases, limit))
            for header in staged
        )
    )


def refuse_all(roster: Roster, reason: str) -> Roster:
    """Return the roster with every update refused: the round is void."""
    return Roster(
        tuple(
            replace(entry, verdict=Verdict.REFUSED, reason=entry.reason or reason)
            for entry in roster.entries
        )
    )


def _norm_limit(headers: list[Header], max_update_norm: float) -> float:
    norms = [header.norm for header in headers if not header.refused]
    if len(norms) < NORMS_FOR_MEDIAN or median(norms) == 0.0:
        return float("inf")
    return max_update_norm * median(norms)


def _objection(
    header: Header, base: bytes, known_bases: Collection[bytes], limit: float
) -> str:
    if header.refused:
        return header.refused
    departs = header.kind is Kind.DEPARTING and header.base in known_bases
    if header.base != base and not departs:
        return f"base: {header.base.hex()} is not the fragment's {base.hex()}"
    if header.norm > limit:
        return f"norm: {header.norm:.3g} is beyond {limit:.3g}, by the round's median"
    return ""


def _entry(header: Header, objection: str) -> RosterEntry:
    return RosterEntry(
        island=header.island,
        incarnation=header.incarnation,
        digest=update_digest(header),
        weight=header.weight,
        verdict=Verdict.REFUSED if objection else Verdict.COUNTED,
        reason=objection,
        inner_steps=header.progress.inner_steps,
        tokens=header.progress.tokens,
    )
