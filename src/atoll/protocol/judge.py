"""Which staged updates of a round count: the same answer for every exchange."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from statistics import median

from atoll.algorithm.outer import LARGEST_NORM
from atoll.protocol.progress import CountedWork, progress_fault
from atoll.settings import RunSettings
from atoll.wire import FrameKind, Header, Roster, RosterEntry, Verdict, update_digest

NORMS_FOR_MEDIAN = 3
"""From this many updates on, a norm is judged against the round's median."""

OWN_NORMS = 5
"""Counted norms that are kept per island, and needed to judge a smaller round."""

Norms = Mapping[str, tuple[float, ...]]
"""The last counted norms of each island, in one fragment, oldest first."""


def judge_updates(
    headers: Iterable[Header],
    *,
    base: bytes,
    known_bases: Collection[bytes],
    norms: Norms,
    counted: Callable[[str], CountedWork | None],
    settings: RunSettings,
) -> Roster:
    """Return the roster of a round whose frozen staged set is `headers`.

    Order of arrival does not matter. A departing update may name any base its
    fragment ever had, because its body does not depend on the anchor. `counted` gives
    the last counted update of an island in this fragment.
    """
    staged = sorted(headers, key=lambda header: header.island.encode())
    objections = {
        header.island: _objection(header, base, known_bases)
        or progress_fault(header, counted=counted(header.island), settings=settings)
        for header in staged
    }
    in_round = [header for header in staged if not objections[header.island]]
    for header in in_round:
        objections[header.island] = _norm_fault(
            header, in_round, norms, settings.limits.max_update_norm
        )
    return Roster(
        entries=tuple(_entry(header, objections[header.island]) for header in staged)
    )


def norms_after(norms: Norms, headers: Iterable[Header], roster: Roster) -> Norms:
    """Return the norms after a round: only updates that counted are learned.

    A refused norm must not become usual by being repeated. A norm of zero is no
    measure of a usual norm, and is not learned either.
    """
    counted = {entry.island for entry in roster.counted}
    new = {
        header.island: header.norm
        for header in headers
        if header.island in counted and header.norm > 0.0
    }
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


def _objection(header: Header, base: bytes, known_bases: Collection[bytes]) -> str:
    if header.refused:
        return header.refused
    departs = header.kind is FrameKind.DEPARTING and header.base in known_bases
    if header.base != base and not departs:
        return f"base: {header.base.hex()} is not the fragment's {base.hex()}"
    if header.norm > LARGEST_NORM:
        return (
            f"norm: {header.norm:.3g} is beyond {LARGEST_NORM:.3g}, above which the "
            "outer step could overflow"
        )
    return ""


def _norm_fault(
    header: Header, in_round: list[Header], norms: Norms, max_update_norm: float
) -> str:
    """Return the reason if a norm exceeds its reference `max_update_norm` times.

    The reference is the round's median, if the round has enough updates. Otherwise it
    is the median of the island's own last norms or, for an island with too few of
    them, of the other islands' last norms. Without any reference nothing is refused.
    """
    positive = [other.norm for other in in_round if other.norm > 0.0]
    own_norms = norms.get(header.island, ())
    others = [norm for name in norms.keys() - {header.island} for norm in norms[name]]
    if len(positive) >= NORMS_FOR_MEDIAN:
        reference, source = median(positive), "the round's median"
    elif len(own_norms) == OWN_NORMS:
        reference, source = (
            median(own_norms),
            f"the median of the island's last {OWN_NORMS}",
        )
    elif len(others) >= OWN_NORMS:
        reference, source = (
            median(others),
            "the median of the other islands' last norms",
        )
    else:
        return ""
    limit = max_update_norm * reference
    if header.norm <= limit:
        return ""
    return (
        f"norm: {header.norm:.3g} is beyond {limit:.3g}, "
        f"limits.max_update_norm={max_update_norm:g} times {source}"
    )


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
