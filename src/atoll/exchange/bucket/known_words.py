"""What an observer of a bucket knows of operators' words, which stand in one order."""

from __future__ import annotations

from atoll.errors import UsageError
from atoll.exchange.bucket.documents import ControlDocument
from atoll.exchange.bucket.known_members import KnownMembers
from atoll.exchange.bucket.sight import Sight
from atoll.protocol.ending import END_ROUNDS
from atoll.protocol.values import changed
from atoll.settings import EPOCH_KEYS


class KnownWords:
    """Heeds what operators have said, word for word."""

    def __init__(self, sight: Sight, members: KnownMembers) -> None:
        self._sight, self._members = sight, members

    def see(self, document: ControlDocument, now_s: float) -> None:
        """Take note of what an operator has said."""
        self._sight.controls.append(document)
        if self._sight.moves.see(len(self._sight.controls), document):
            self._sight.state = changed(self._sight.state, move=self._sight.moves.move)
        elif self._heed(document):
            self._sight.in_force.append(document)
        self._sight.settle(now_s)

    def _heed(self, document: ControlDocument) -> bool:
        """Do what an operator has said; False: that is impossible."""
        match document.action:
            case "set":
                return self._set(document)
            case "pause" | "resume":
                is_paused = document.action == "pause"
                self._sight.state = changed(self._sight.state, is_paused=is_paused)
            case "save":
                self._sight.state = changed(
                    self._sight.state, saves=self._sight.state.saves + 1
                )
            case "stop":
                self._sight.state = changed(
                    self._sight.state, last_round=document.last_round
                )
            case "evict" if document.island is not None:
                self._members.evict(document.island, document.incarnation)
        return True

    def _set(self, document: ControlDocument) -> bool:
        if not EPOCH_KEYS.issuperset(document.values):
            return False  # what can never change is not changed by any document
        try:
            settings = self._sight.settings.with_values(document.values)
        except UsageError:
            return False  # whoever put it there was not Atoll
        last = self._sight.state.last_round
        if END_ROUNDS in document.values:
            last = settings.run.end_rounds
        self._sight.state = changed(
            self._sight.state,
            settings=settings,
            epoch=self._sight.state.epoch + 1,
            last_round=last,
        )
        return True
