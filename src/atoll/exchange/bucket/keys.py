"""The keys of a run's objects in a bucket.

    settings/0                        the run's settings; a URL without it is no run
    founding/<nonce>/<fragment>       the first weights
    founding/<nonce>/constants/<digest>/<part>            tensors that are never trained
    bundle/<digest>                   the model's definition, which the settings name
    code/<digest>                     code for islands that are launched elsewhere
    run.json                          names the founding; put last: then there is a run
    control/<number>                  commands of operators, in order
    claims/<number>                   rows that islands have claimed, in order
    claims/states/<number>            the ledger of rows after an entry of that log
    slots/<number>                    the name of the island that has the slot
    members/<slug>.<incarnation>      overwritten by each heartbeat of the incarnation
    past/<slug>.<incarnation>         how its training went, for people
    rounds/<fragment>/<round>/up/<slug>.<incarnation>     an update, in one object
    arrivals/<fragment>/<slug>.<incarnation>.<label>      one of an asynchronous run
    rounds/<fragment>/<round>/roster                      put once: the round is closed
    rounds/<fragment>/<round>/mean/<shard>                a part of the agreed body
    states/<fragment>/<round>/<part>                      anchor and velocity
    states/<fragment>/<round>/complete                    put last

Names of islands may hold any letters, keys only a few: a name's slug ends with its
digest, so that two names never share one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from atoll.wire import blake3_digest

SETTINGS, RUN = "settings/0", "run.json"
MEMBERS, CONTROL, SLOTS, STATES = "members/", "control/", "slots/", "states/"
COMPLETE = "complete"
CODE, ARRIVALS, PAST = "code/", "arrivals/", "past/"
CLAIMS, LEDGERS = "claims/", "claims/states/"

_SLUG_BYTES = 40
_OTHERS = re.compile("[^a-z0-9-]+")


class IncarnationKey(NamedTuple):
    """One incarnation of an island, as it is written in keys."""

    slug: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.slug}.{self.incarnation}"


class UpdateKey(NamedTuple):
    """An update of a fragment, as it is written in keys."""

    round: int
    """The round that it was sealed for: its label in an asynchronous run."""

    publisher: IncarnationKey

    @classmethod
    def of(cls, round: int, island: str, incarnation: int) -> UpdateKey:
        return cls(round, IncarnationKey(slug(island), incarnation))


def slug(island: str) -> str:
    """Return the form of an island's name that is used in keys."""
    readable = _OTHERS.sub("-", island.lower())[:_SLUG_BYTES].strip("-")
    return f"{readable}-{blake3_digest(island.encode()).hex()[:12]}"


def incarnation_of(key: str) -> IncarnationKey | None:
    """Return the incarnation at the end of a key; None if there is none."""
    slug, dot, number = key.rpartition("/")[2].rpartition(".")
    if not (dot and slug and _is_number(number)):
        return None
    return IncarnationKey(slug, int(number))


def _is_number(digits: str) -> bool:
    """Return whether some digits are a whole number as it is written in keys."""
    if not (digits.isascii() and digits.isdecimal()) or len(digits) >= 20:
        return False
    return str(int(digits)) == digits


def member(island: str, incarnation: int) -> str:
    """Return the key of an incarnation's member document."""
    return f"{MEMBERS}{IncarnationKey(slug(island), incarnation)}"


def past(island: str, incarnation: int) -> str:
    """Return the key of an incarnation's own past."""
    return f"{PAST}{IncarnationKey(slug(island), incarnation)}"


def control(number: int) -> str:
    """Return the key of an operator's command."""
    return f"{CONTROL}{number}"


def claim(number: int) -> str:
    """Return the key of an entry of the log of claims."""
    return f"{CLAIMS}{number}"


def ledger(number: int) -> str:
    """Return the key of the ledger of rows after an entry of that log."""
    return f"{LEDGERS}{number}"


def number_of(key: str, prefix: str) -> int | None:
    """Return the number that a key has after a prefix; None if it has another form."""
    digits = key.removeprefix(prefix)
    return int(digits) if key.startswith(prefix) and _is_number(digits) else None


def slot(number: int) -> str:
    """Return the key of a slot."""
    return f"{SLOTS}{number}"


def bundle(digest: str) -> str:
    """Return the key of the model's definition."""
    return f"bundle/{digest}"


def code(digest: str) -> str:
    """Return the key of code that islands were launched with."""
    return f"{CODE}{digest}"


def founding(nonce: str, fragment: int) -> str:
    """Return the key of a fragment's first state."""
    return f"founding/{nonce}/{fragment}"


def constant_part(nonce: str, digest: str, part: int) -> str:
    """Return the key of a part of a founder's constant."""
    return f"founding/{nonce}/constants/{digest}/{part}"


def round_prefix(fragment: int, round: int) -> str:
    """Return the prefix of a round's keys."""
    return f"rounds/{fragment}/{round}/"


def update(fragment: int, round: int, island: str, incarnation: int) -> str:
    """Return the key of an incarnation's update."""
    return f"{updates(fragment, round)}{IncarnationKey(slug(island), incarnation)}"


def updates(fragment: int, round: int) -> str:
    """Return the prefix of the keys of a round's updates."""
    return f"{round_prefix(fragment, round)}up/"


def arrivals(fragment: int) -> str:
    """Return the prefix of the keys of a fragment's updates, in asynchronous runs."""
    return f"{ARRIVALS}{fragment}/"


def arrival(fragment: int, update: UpdateKey) -> str:
    """Return the key of an update of an asynchronous run."""
    return f"{arrivals(fragment)}{update.publisher}.{update.round}"


def arrival_of(key: str) -> UpdateKey | None:
    """Return the update in the key of an arrival; None if there is none."""
    publisher, _, label = key.rpartition(".")
    incarnation = incarnation_of(publisher)
    if incarnation is None or not _is_number(label):
        return None
    return UpdateKey(int(label), incarnation)


def roster(fragment: int, round: int) -> str:
    """Return the key at which a round is closed."""
    return f"{round_prefix(fragment, round)}roster"


def mean(fragment: int, round: int, shard: int) -> str:
    """Return the key of a part of a round's mean."""
    return f"{round_prefix(fragment, round)}mean/{shard}"


def states(fragment: int) -> str:
    """Return the prefix of the keys of a fragment's states."""
    return f"{STATES}{fragment}/"


def state_part(fragment: int, round: int, part: int) -> str:
    """Return the key of a part of a state."""
    return f"{states(fragment)}{round}/{part}"


def state_complete(fragment: int, round: int) -> str:
    """Return the key of the document that completes a state."""
    return f"{states(fragment)}{round}/{COMPLETE}"
