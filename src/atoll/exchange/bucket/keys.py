"""Where in a bucket a run keeps what.

    settings/0                        what the run owns; a URL without it is no run
    founding/<nonce>/<fragment>       the first weights
    founding/<nonce>/constants/<digest>/<part>            what is never trained
    bundle/<digest>                   the model's definition, which the settings name
    code/<digest>                     what islands run that were launched elsewhere
    run.json                          names the founding; put last: then there is a run
    control/<number>                  what operators have said, in order
    slots/<number>                    which name has the slot
    members/<slug>.<incarnation>      one life of an island; its heartbeat overwrites it
    rounds/<fragment>/<round>/up/<slug>.<incarnation>     an update, whole or not there
    rounds/<fragment>/<round>/roster                      put once: the round is closed
    rosters/<fragment>/<round>/<move>                     the same, after that move
                                                          was given up
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
CODE = "code/"

_SLUG_BYTES = 40
_OTHERS = re.compile("[^a-z0-9-]+")


class IncarnationKey(NamedTuple):
    """One life of an island, as a key has it."""

    slug: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.slug}.{self.incarnation}"


def slug(island: str) -> str:
    """Return what stands for a name in keys."""
    readable = _OTHERS.sub("-", island.lower())[:_SLUG_BYTES].strip("-")
    return f"{readable}-{blake3_digest(island.encode()).hex()[:12]}"


def incarnation_of(key: str) -> IncarnationKey | None:
    """Return whose object a key names; None if nobody's."""
    slug, dot, number = key.rpartition("/")[2].rpartition(".")
    is_life = dot and slug and number.isascii() and number.isdecimal()
    life = IncarnationKey(slug, int(number)) if is_life and len(number) < 20 else None
    return life if life and str(life.incarnation) == number else None


def member(island: str, incarnation: int) -> str:
    """Return where a life of an island says that it lives."""
    return f"{MEMBERS}{IncarnationKey(slug(island), incarnation)}"


def control(number: int) -> str:
    """Return where an operator's word stands."""
    return f"{CONTROL}{number}"


def slot(number: int) -> str:
    """Return where a slot's name stands."""
    return f"{SLOTS}{number}"


def bundle(digest: str) -> str:
    """Return where the model's definition is."""
    return f"bundle/{digest}"


def code(digest: str) -> str:
    """Return where code is that islands were launched with."""
    return f"{CODE}{digest}"


def founding(nonce: str, fragment: int) -> str:
    """Return where the first state of a fragment is."""
    return f"founding/{nonce}/{fragment}"


def constant_part(nonce: str, digest: str, part: int) -> str:
    """Return where a part of a founder's constant is."""
    return f"founding/{nonce}/constants/{digest}/{part}"


def round_prefix(fragment: int, round: int) -> str:
    """Return what the keys of a round begin with."""
    return f"rounds/{fragment}/{round}/"


def update(fragment: int, round: int, island: str, incarnation: int) -> str:
    """Return where a life of an island puts its update."""
    return f"{updates(fragment, round)}{IncarnationKey(slug(island), incarnation)}"


def updates(fragment: int, round: int) -> str:
    """Return what the keys of a round's updates begin with."""
    return f"{round_prefix(fragment, round)}up/"


def roster(fragment: int, round: int) -> str:
    """Return where a round is closed."""
    return f"{round_prefix(fragment, round)}roster"


def roster_after(fragment: int, round: int, move: int) -> str:
    """Return where a round is closed that a move had frozen, and was given up."""
    return f"rosters/{fragment}/{round}/{move}"


def mean(fragment: int, round: int, shard: int) -> str:
    """Return where a part of a round's mean is."""
    return f"{round_prefix(fragment, round)}mean/{shard}"


def states(fragment: int) -> str:
    """Return what the keys of a fragment's states begin with."""
    return f"{STATES}{fragment}/"


def state_part(fragment: int, round: int, part: int) -> str:
    """Return where a part of a state is."""
    return f"{states(fragment)}{round}/{part}"


def state_complete(fragment: int, round: int) -> str:
    """Return where a state is said to be complete."""
    return f"{states(fragment)}{round}/{COMPLETE}"
