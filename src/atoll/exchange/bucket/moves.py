"""What operators have said of a run's going elsewhere, in the order of their words.

Rule 1: the first `moved` or `stay` after a `move` decides where the run is. Words form
        one sequence, each put once: so everybody reads the same.
Rule 2: while a move is under way no other word is in force, nor after it.

A `move` freezes each fragment by a roster that names it: nobody can close that round,
however late an island learns of the move. If it is given up the round is as it was, and
its roster is put at the next key.
"""

from __future__ import annotations

from atoll.exchange.bucket.documents import ControlDocument
from atoll.protocol.run_state import Move
from atoll.protocol.values import changed

ACTIONS = ("move", "moved", "stay")


class Moves:
    """Reads the words, one after the other."""

    def __init__(self) -> None:
        self.move: Move | None = None
        """The one that is under way, or over."""

        self.number = 0
        """Of the word by which it began, or the last one did."""

        self.begun: set[int] = set()
        self.given_up: set[int] = set()

    def see(self, number: int, document: ControlDocument) -> bool:
        """Take note of a word; False: it is about something else, and in force."""
        match document.action:
            case "move" if self.move is None and document.target is not None:
                self.move = Move(target=document.target, nonce=document.nonce)
                self.number = number
                self.begun.add(number)
            case "moved" if self._is_under_way:
                assert self.move is not None
                self.move = changed(self.move, is_over=True)
            case "stay" if self._is_under_way:
                self.given_up.add(self.number)
                self.move = None
        return self.move is not None or document.action in ACTIONS

    def is_under_way(self, number: int) -> bool:
        """Return whether it is not decided yet where a move has led."""
        return number == self.number and self._is_under_way

    @property
    def _is_under_way(self) -> bool:
        return self.move is not None and not self.move.is_over
