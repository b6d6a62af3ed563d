"""What earlier lives of an island have left in a bucket, for the one that enters."""

from __future__ import annotations

from functools import partial

from atoll.exchange.bucket import keys
from atoll.exchange.bucket.documents import Stand
from atoll.exchange.bucket.keys import Life, life_of
from atoll.exchange.bucket.leftovers import Leftovers
from atoll.exchange.bucket.lookout import Lookout


class EarlierLives:
    """Finds what they have published and no round has counted yet."""

    def __init__(self, lookout: Lookout) -> None:
        self._lookout, self._leftovers = lookout, Leftovers(lookout)
        self._store, self._timing = lookout.store, lookout.timing

    def bring(self) -> None:
        """Put what farewells name, and closed rounds have left out, into open ones.

        Once the next life has entered nobody may: it is the only one that is believed.
        """
        for fragment in range(len(self._lookout.sight.layout)):
            self._leftovers.bring(fragment)

    def stands(self, island: str, incarnation: int) -> tuple[Stand, ...]:
        """Return the updates of earlier lives for the open rounds, and those after.

        Of several the latest: it was put by a life that did not name the others.
        """
        if incarnation == 1:
            return ()
        wheres = [
            (round.fragment, number)
            for round in self._lookout.sight.state.rounds
            for number in (round.number, round.number + 1)
        ]
        finds = [partial(self._standing, *each, island, incarnation) for each in wheres]
        return tuple(
            Stand(fragment=fragment, round=number, incarnation=found)
            for (fragment, number), found in zip(
                wheres, self._timing.together(finds), strict=True
            )
            if found
        )

    def _standing(
        self, fragment: int, round: int, island: str, incarnation: int
    ) -> int:
        """Return which earlier life has published for a round; 0: none has.

        The last one's update is asked for by its key, because a list may be late.
        What cannot be read as an update speaks for nobody.
        """
        slug, has_update = keys.slug(island), self._lookout.updates.has
        if has_update(fragment, round, Life(slug, incarnation - 1)):
            return incarnation - 1
        items = self._store.items(keys.updates(fragment, round))
        lives = [life for item in items if (life := life_of(item.key))]
        return max(
            [
                life.incarnation
                for life in lives
                if life.slug == slug
                and life.incarnation < incarnation
                and has_update(fragment, round, life)
            ],
            default=0,
        )
