"""Saved work that an earlier life's update may hold: held back until its outcome."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.island.leftover import settled_left
from atoll.island.saved import SavedFragment
from atoll.protocol.island_rejoin import Left, Since, counted_in, what_is_left
from atoll.wire import Roster, update_digest


@dataclass(kw_only=True)
class HeldBack:
    """What is put back when the update that stands for `round` does not count."""

    round: int
    saved: SavedFragment
    most: Left
    """What was left of it before that update: all, or what came since its seal."""

    progress: tuple[int, int]
    """Inner steps and tokens of all lives: settled, if nothing is put back."""

    left: Left | None = None
    """None: no outcome yet."""

    @property
    def may_stand(self) -> bool:
        """Whether the update that stands may be the saved one."""
        update = self.saved.update
        is_of_round = update is not None and update.round == self.round
        return self.most is Left.ALL and is_of_round

    @property
    def remains(self) -> Left:
        """What is to be put back now: without an outcome nothing stands any more."""
        return self.most if self.left in (None, Left.ALL) else self.left

    @property
    def settled(self) -> tuple[int, int]:
        """The inner steps and tokens that are settled when that is put back."""
        return settled_left(self.saved, self.remains, self.progress)

    def judge(self, roster: Roster, island: str) -> None:
        """Take note of the outcome."""
        since = counted_in(roster, island, self._digest())
        self.left = what_is_left(
            since or Since.NOTHING, is_refused=since is None, is_base_known=True
        )

    def _digest(self) -> bytes:
        update = self.saved.update
        if not self.may_stand or update is None or update.frame is None:
            return b""
        return update_digest(update.frame.header)
