"""How an island publishes in a bucket: an update is put once, and then looked after."""

from __future__ import annotations

from atoll.errors import CorruptError, Refused
from atoll.exchange.base import Frame
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.closing import Closing
from atoll.exchange.bucket.living import Living
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.pauses import Pauses
from atoll.protocol import Reception
from atoll.wire import Header, Kind, pack, update_digest, verify_body


class Publishing:
    """Puts the updates of one life of an island."""

    def __init__(
        self, living: Living, closing: Closing, outcomes: Outcomes, pauses: Pauses
    ) -> None:
        self._living, self._closing = living, closing
        self._outcomes, self._pauses = outcomes, pauses
        self._lookout = living.lookout
        self._store, self._timing = living.lookout.store, living.lookout.timing
        self.departed: set[tuple[int, int]] = set()
        """Where this life was promised that what it leaves will count."""

    def publish(self, frame: Frame) -> Reception:
        """Make an update known to the run, and look who else has published.

        Raises:
            Refused: another one stands, or its round cannot be open yet.
            CorruptError: the body does not verify.
            LeaseLost: a later life has the name.
            RunMoved: it departs, and the run is elsewhere.
        """
        header = frame.header
        member = self._living.require()
        self._require_own(frame)
        verify_body(header, frame.body)
        if self._is_ahead(frame):
            self._lookout.look_round(header.fragment)
        with self._lookout.lock:
            known = self._lookout.sight.reception(header)
        if known is not None:
            return known
        if self._is_ahead(frame):
            raise Refused(
                f"Round {header.round} of fragment {header.fragment} cannot be "
                "published yet: another is open. Wait for its outcome."
            )
        if any(
            (stand.fragment, stand.round) == (header.fragment, header.round)
            for stand in member.stands
        ):
            return Reception.SPOKEN_FOR
        self.put(frame)
        self._closing.settle(header.fragment)
        if header.kind is Kind.DEPARTING:
            # Nobody is left to find out later: a list may not have the roster yet.
            self._lookout.follow(header.fragment)
            self._require_taken(header.fragment)
        with self._lookout.lock:
            known = self._lookout.sight.reception(header)
        if header.kind is Kind.DEPARTING and known is None:
            self.departed.add((header.fragment, header.round))
        return known or Reception.STAGED

    def _require_taken(self, fragment: int) -> None:
        """Return if what was put stays here: who goes elsewhere may have left it out.

        Raises:
            RunMoved: the run is elsewhere, and the update is to be published there.
        """
        if self._lookout.sight.state.move is not None:
            self._lookout.require_staying()
            self._lookout.follow(fragment)

    def put(self, frame: Frame) -> None:
        """Put an update where there is none; the same one again is the same."""
        header = frame.header
        where = (header.fragment, header.round)
        key = keys.update(*where, header.island, header.incarnation)
        if not self._store.put_new(key, [pack(header), frame.body.data]):
            self._require_same(key, header)
        self._outcomes.own.setdefault(where, frame)
        self._pauses.begin(header.fragment, self._timing.now_s())
        self._lookout.updates.keep(header)

    def _require_same(self, key: str, header: Header) -> None:
        """Return if this very update stands at its key already."""
        try:
            standing, _ = self._lookout.read_update(key, 2**62)
        except CorruptError as exc:
            raise CorruptError(
                f"{key} holds no update, and that of this island cannot be put there: "
                f"{exc} Remove that object, and start the island again."
            ) from exc
        if update_digest(standing) != update_digest(header):
            raise Refused(
                f"Another update of island {header.island!r} stands for round "
                f"{header.round} of fragment {header.fragment}, at {key}. Wait for its "
                "outcome."
            )

    def _is_ahead(self, frame: Frame) -> bool:
        header = frame.header
        with self._lookout.lock:
            open_round = self._lookout.sight.number(header.fragment)
        return header.round > open_round + (header.kind is Kind.DEPARTING)

    def _require_own(self, frame: Frame) -> None:
        header, rounds = frame.header, self._lookout.sight.state.rounds
        if header.run != self._lookout.run:
            raise Refused(
                f"The frame belongs to run {header.run!r}, and this is "
                f"{self._lookout.run!r}. Join this run first."
            )
        if not 0 <= header.fragment < len(rounds):
            raise Refused(
                f"Fragment {header.fragment} does not exist: the run has "
                f"{len(rounds)}. Take the settings from the run."
            )
