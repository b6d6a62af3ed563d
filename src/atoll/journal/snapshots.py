"""Which states and means are kept, how they lead to the present, and compaction.

Rule 1: kept are the newest state and one to fall back on, every mean after that one,
        and at the least the last two outcomes' bodies.
Rule 2: nothing is removed before what replaces it is durable and verified.
Rule 3: a damaged state is reported and done without, while an older one and the means
        after it still lead to the same digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from atoll.disk import Disk
from atoll.errors import CorruptError
from atoll.journal.bodies import Bodies
from atoll.journal.compaction import Compaction
from atoll.journal.recorded import Recorded, RecordedFragment
from atoll.journal.records import Agreed
from atoll.journal.states import (
    begin,
    rebuild,
    state_name,
    state_rounds,
    stored_state,
)
from atoll.journal.stored import StoredBody
from atoll.weights import FragmentState

KEPT_OUTCOMES = 2


class Snapshots:
    """The states of a run's fragments on a disk."""

    def __init__(
        self,
        disk: Disk,
        recorded: Recorded,
        bodies: Bodies,
        read_agreed: Callable[[int, int], Agreed],
    ) -> None:
        self._disk, self._recorded, self._bodies = disk, recorded, bodies
        self._read_agreed = read_agreed
        self._damaged: set[tuple[int, int]] = set()
        self.damage: list[str] = []

    def check(self, gone: set[tuple[int, int]]) -> None:
        """Return if every fragment's present state can be reached.

        `gone` are fragment and round of bodies that are named and not there. Only what
        is on the disk is looked at, not what is in it.

        Raises:
            CorruptError: naming what is missing.
        """
        for fragment, known in enumerate(self._recorded.fragments):
            rounds = state_rounds(self._disk, fragment)
            states = [round for round in rounds if round <= known.round]
            if not any(known.leads_from(round) for round in states):
                raise _unreachable(fragment, known, states)
            floor = min([known.round - KEPT_OUTCOMES, *states[1:2]])
            for index, round in sorted(gone):
                if index == fragment and round > floor:
                    self._report(
                        f"The body of round {round} of fragment {fragment} is missing."
                    )

    def load(self, fragment: int) -> FragmentState:
        """Return the present state, replayed to the recorded bits.

        Raises:
            CorruptError: no kept state and means lead there.
        """
        known = self._recorded.fragment(fragment)
        for stored in self._candidates(fragment, known.round):
            try:
                state = begin(stored)
            except CorruptError as exc:
                self._set_aside(fragment, stored.header.round, exc)
                continue
            means = self._means(fragment, state.round, known.round)
            rebuild(state, stored.header, means)
            return state
        raise _unreachable(fragment, known, [])

    def compact(self, fragment: int) -> None:
        """Have a state of the newest round, and collect what is needed no more.

        Safe to repeat, and at every instant of a crash. Rounds may be committed
        meanwhile.

        Raises:
            CorruptError: the kept means do not lead to the recorded digest.
            DiskError: what was there is still there.
        """
        known = self._recorded.fragment(fragment)
        round = known.round
        for stored in self._candidates(fragment, round):
            if stored.header.round == round:
                # Its maker may have been told that writing it had failed.
                self._disk.sync(stored.name)
                break
            try:
                stored.verify()
            except CorruptError as exc:
                self._set_aside(fragment, stored.header.round, exc)
                continue
            self._write(fragment, stored, round)
            break
        else:
            raise _unreachable(fragment, known, [])
        self._collect(fragment, round)

    def _write(self, fragment: int, stored: StoredBody, round: int) -> None:
        known = self._recorded.fragment(fragment)
        means = self._means(fragment, stored.header.round, round)
        digest = known.digests[round]
        compaction = Compaction(stored, [mean for mean, _ in means], digest)
        name = state_name(fragment, round)
        self._disk.remove(name)  # a damaged one, or one that the log does not know
        self._disk.write_new(name, compaction.parts())
        self._damaged.discard((fragment, round))

    def _collect(self, fragment: int, round: int) -> None:
        known = self._recorded.fragment(fragment)
        states = [n for n in state_rounds(self._disk, fragment) if n <= round]
        good = [n for n in states if (fragment, n) not in self._damaged]
        fallback = good[:2][-1]
        floor = min(fallback, round - KEPT_OUTCOMES)
        old = [number for number in list(known.places) if number <= floor]
        self._bodies.collect(self._recorded.fragments, fragment, old)
        for number in states:
            if number not in good[:2]:
                self._disk.remove(state_name(fragment, number))

    def _candidates(self, fragment: int, round: int) -> Iterator[StoredBody]:
        """Yield the states that lead to `round`, newest first, bodies not verified."""
        known = self._recorded.fragment(fragment)
        for number in state_rounds(self._disk, fragment):
            is_out = (fragment, number) in self._damaged or number > round
            if is_out or not known.leads_from(number):
                continue
            try:
                yield stored_state(self._disk, fragment, number, known.digests[number])
            except CorruptError as exc:
                self._set_aside(fragment, number, exc)

    def _means(
        self, fragment: int, first: int, last: int
    ) -> list[tuple[StoredBody, bytes]]:
        """Return the means after round `first`, each with the digest it leads to."""
        known = self._recorded.fragment(fragment)
        means = []
        for round in range(first + 1, last + 1):
            agreed = self._read_agreed(fragment, round)
            place = known.places.get(round)
            means.append((self._bodies.stored(agreed, place), known.digests[round]))
        return means

    def _set_aside(self, fragment: int, round: int, why: CorruptError) -> None:
        self._damaged.add((fragment, round))
        self._report(f"{why}")

    def _report(self, what: str) -> None:
        if what not in self.damage:
            self.damage.append(what)


def _unreachable(
    fragment: int, known: RecordedFragment, states: list[int]
) -> CorruptError:
    if not states:
        lost = f"no state of it that verifies is on the disk for round {known.round}"
    else:
        missing = next(
            round
            for round in range(states[0] + 1, known.round + 1)
            if round not in known.places and round not in known.void
        )
        lost = f"the body of round {missing} is missing"
    return CorruptError(
        f"Fragment {fragment} cannot be replayed to round {known.round}: {lost}. "
        "Restore the journal from a copy, or recover the run from its islands."
    )
