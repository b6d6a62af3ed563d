"""Which staged updates of a round count: the same answer for every exchange."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from statistics import median

from atoll.wire import Header, Kind, Roster, RosterEntry, Verdict, update_digest

NORMS_FOR_MEDIAN = 3
"""From this many updates on, a norm is judged against the round's median."""

OWN_NORMS = 5
"""With fewer it is judged against the island's own last ones, once there are these."""

Norms = Mapping[str, tuple[float, ...]]
"""The last norms of each island, in one fragment, oldest first."""


def judge_updates(
    headers: Iterable[Header],
    *,
    base: bytes,
    known_bases: Collection[bytes],
    max_update_norm: float,
    norms: Norms,
) -> Roster:
    """Return the roster of a round whose frozen staged set is `headers`.

    Order of arrival does not matter. A departing update may name any base its
    fragment ever had, because its body does not depend on the anchor.
    """
    staged = sorted(headers, key=lambda header: header.island.encode())
    in_round = _norms_of(staged)
    return Roster(
        entries=tuple(
            _entry(
                header,
                _objection(header, base, known_bases)
                or _beyond(header, in_round, norms, max_update_norm),
            )
            for header in staged
        )
    )


def norms_after(norms: Norms, headers: Iterable[Header]) -> Norms:
    """Return the norms after a round: those that were refused too.

    An island whose updates have grown for good is so refused for a while only.
    """
    new = {each.island: each.norm for each in headers if not each.refused}
    return {
        island: (*norms.get(island, ()), *([new[island]] if island in new else []))[
            -OWN_NORMS:
        ]
        for island in norms.keys() | new.keys()
    }


def refuse_all(roster: Roster, reason: str) -> Roster:
    """Return the roster with every update refused: the round is void."""
    return Roster(
        tuple(
            replace(entry, verdict=Verdict.REFUSED, reason=entry.reason or reason)
            for entry in roster.entries
        )
    )


def _norms_of(headers: Iterable[Header]) -> list[float]:
    return [header.norm for header in headers if not header.refused]


def _objection(header: Header, base: bytes, known_bases: Collection[bytes]) -> str:
    if header.refused:
        return header.refused
    departs = header.kind is Kind.DEPARTING and header.base in known_bases
    if header.base != base and not departs:
        return f"base: {header.base.hex()} is not the fragment's {base.hex()}"
    return ""


def _beyond(
    header: Header, in_round: list[float], norms: Norms, max_update_norm: float
) -> str:
    """Return what a norm is beyond, if it is."""
    own = norms.get(header.island, ())
    if len(in_round) >= NORMS_FOR_MEDIAN:
        usual, whose = median(in_round), "the round's median"
    elif len(own) == OWN_NORMS:
        usual, whose = median(own), f"the median of the island's last {OWN_NORMS}"
    else:
        return ""
    limit = max_update_norm * usual
    if usual == 0.0 or header.norm <= limit:
        return ""
    return f"norm: {header.norm:.3g} is beyond {limit:.3g}, by {whose}"


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
