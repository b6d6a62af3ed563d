"""What must hold of every round: its order, its roster, its mean, its bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.coordinator import Service
from atoll.errors import NonFinite
from atoll.exchange import Outcome
from atoll.settings import RunSettings
from atoll.simulate.invariants.claims import (
    COUNTED_ONCE,
    DURABLE_FIRST,
    ROUNDS_IN_ORDER,
    SAME_OUTCOME,
    SAME_STATE,
    TRUE_MEAN,
    Report,
)
from atoll.simulate.invariants.truth import Commit, Life, Truth, Update
from atoll.weights import (
    Contribution,
    FragmentLayout,
    FragmentState,
    Layout,
    reduce,
    terms_of,
)
from atoll.wire import codec

COORDINATOR = "coordinator"


class Rounds:
    """Judges every commit, every restart, and whatever islands come to hold."""

    def __init__(
        self, truth: Truth, settings: RunSettings, layout: Layout, report: Report
    ) -> None:
        self._truth, self._settings, self._layout = truth, settings, layout
        self._report = report
        self._attempts: dict[tuple[int, int], Commit] = {}
        self._founded: dict[int, bytes] = {}
        self._counted: dict[bytes, int] = {}
        self._steps: dict[tuple[Life, int], int] = {}

    def attempted(self, commit: Commit) -> None:
        """Remember an outcome that the disk may yet refuse."""
        self._attempts[commit.header.fragment, commit.header.round] = commit

    def committed(self, commit: Commit) -> None:
        """Judge an outcome that the journal calls durable."""
        self._require_next(commit)
        self._abandon(commit)
        self._truth.commit(commit)
        for update in self._require_published(commit):
            self._require_once(commit, update)
        self._require_mean(commit)

    def opened(self, service: Service, *, was_put_back: bool = False) -> None:
        """Judge what a coordinator knows that has just begun to live.

        One whose disk was put back may know less than was committed, and its journal
        will have gaps; everything else holds all the same.
        """
        self._truth.has_gaps |= was_put_back
        for fragment, state in enumerate(service.weights):
            last = self._truth.last.get(fragment, 0)
            if state.round < last and not was_put_back:
                self._report(
                    DURABLE_FIRST,
                    COORDINATOR,
                    f"came back at round {state.round} of fragment {fragment}, and "
                    f"round {last} was committed",
                )
            attempt = self._attempts.get((fragment, last + 1))
            if state.round == last + 1 and attempt is not None:
                # The disk kept what it had refused: the record came back whole.
                self._truth.commit(attempt)
            self.holds(COORDINATOR, fragment, state)

    def founded(self, weights: Sequence[FragmentState]) -> None:
        """Take the run's first weights as everybody's."""
        for fragment, state in enumerate(weights):
            if state.round == 0:
                self._founded.setdefault(fragment, state.digest)

    def holds(self, who: str, fragment: int, state: FragmentState) -> None:
        """Judge the state that somebody holds of a fragment."""
        if state.round == 0:
            expected = self._founded.get(fragment, state.digest)
        else:
            commit = self._truth.commits.get((fragment, state.round))
            if commit is None:
                self._report(
                    DURABLE_FIRST,
                    who,
                    f"holds round {state.round} of fragment {fragment}, which was "
                    "never committed",
                )
                return
            expected = commit.digest_after
        if state.digest != expected:
            self._report(
                SAME_STATE,
                who,
                f"holds {state.digest.hex()[:12]} at round {state.round} of fragment "
                f"{fragment}, where others hold {expected.hex()[:12]}",
            )

    def learned(self, who: str, outcome: Outcome) -> None:
        """Judge an outcome that an island was told."""
        header = outcome.agreed.header
        commit = self._truth.commits.get((header.fragment, header.round))
        if commit is None:
            self._report(
                DURABLE_FIRST,
                who,
                f"was told of round {header.round} of fragment {header.fragment}, "
                "which was never committed",
            )
            return
        has_same_body = not outcome.has_body or (
            outcome.agreed.body.tobytes() == commit.body
        )
        has_same_header = header is commit.header or header == commit.header
        if not header.is_sealed:
            # The body is collected, and what was known of it: the rest stays.
            known = header.sealed(
                body_bytes=commit.header.body_bytes, pieces=commit.header.pieces
            )
            has_same_header = known == commit.header
        if not has_same_header or not has_same_body:
            self._report(
                SAME_OUTCOME,
                who,
                f"was told another outcome of round {header.round} of fragment "
                f"{header.fragment} than was committed",
            )

    def ended(self, service: Service) -> None:
        """Judge the journal at the end: all rounds, each once."""
        if self._truth.has_gaps:
            return
        for fragment, known in enumerate(service.journal.recorded.fragments):
            rounds = sorted(known.where)
            if rounds != list(range(1, self._truth.last.get(fragment, 0) + 1)):
                self._report(
                    ROUNDS_IN_ORDER,
                    COORDINATOR,
                    f"its journal has rounds {rounds} of fragment {fragment}",
                )

    def _require_next(self, commit: Commit) -> None:
        fragment, round = commit.header.fragment, commit.header.round
        last = self._truth.last.get(fragment, 0)
        last_round = self._settings.run.end_rounds
        is_beyond = last_round is not None and round > last_round
        is_next = round == last + 1 or self._truth.has_gaps
        if not is_next or is_beyond:
            self._report(
                ROUNDS_IN_ORDER,
                COORDINATOR,
                f"committed round {round} of fragment {fragment} after round {last}; "
                f"the last one is {last_round}",
            )

    def _abandon(self, commit: Commit) -> None:
        """Forget what was counted in rounds that are lost and made anew.

        A journal was put back, and no island is left that has taken them.
        """
        fragment, round = commit.header.fragment, commit.header.round
        if round > self._truth.last.get(fragment, 0):
            return
        self._steps = {k: v for k, v in self._steps.items() if k[1] != fragment}
        for digest, update in self._truth.updates.items():
            header = update.header
            if header.fragment == fragment and header.round >= round:
                self._counted.pop(digest, None)

    def _require_published(self, commit: Commit) -> list[Update]:
        """Return the counted updates, all of which islands did publish."""
        assert commit.header.roster is not None
        updates = []
        for entry in commit.header.roster.counted:
            update = self._truth.updates.get(entry.digest)
            key = (commit.header.fragment, commit.header.round, entry.island)
            if update is None or key != _key(update):
                self._report(
                    COUNTED_ONCE,
                    entry.island,
                    f"round {key[1]} of fragment {key[0]} counts an update that was "
                    "never published for it",
                )
            else:
                updates.append(update)
        return updates

    def _require_once(self, commit: Commit, update: Update) -> None:
        header, key = update.header, (update.life, update.header.fragment)
        origin = self._truth.origins.get(update.digest, update.digest)
        before = self._counted.setdefault(origin, header.round)
        steps = header.progress.inner_steps
        # An update that departs may hold no steps, but what a codec had left over. And
        # a journal that was put back may give an incarnation to a second life. What is
        # brought along may be older than what the same island left after it.
        may_go_back = self._truth.has_gaps or origin != update.digest
        goes_back = steps < self._steps.get(key, 0) and not may_go_back
        if before != header.round or goes_back:
            self._report(
                COUNTED_ONCE,
                header.island,
                f"round {header.round} of fragment {header.fragment} counts inner "
                f"steps up to {steps}, and {self._steps.get(key, 0)} had counted in "
                f"round {before} or before",
            )
        if origin == update.digest:
            self._steps[key] = steps

    def _require_mean(self, commit: Commit) -> None:
        header, layout = commit.header, self._layout[commit.header.fragment]
        assert header.roster is not None
        parts = [
            Contribution(
                codec(update.header.codec),
                np.frombuffer(update.body, np.uint8),
                update.header.weight,
            )
            for entry in header.roster.counted
            if (update := self._truth.updates.get(entry.digest)) is not None
        ]
        mean = self._mean(layout, parts)
        if mean != commit.body:
            self._report(
                TRUE_MEAN,
                COORDINATOR,
                f"the body of round {header.round} of fragment {header.fragment} is "
                f"not the mean of its {len(parts)} counted updates",
            )

    def _mean(self, layout: FragmentLayout, parts: list[Contribution]) -> bytes:
        """Return the agreed body of these updates; a void round has none."""
        if not parts:
            return b""
        terms = terms_of(layout, self._settings)
        try:
            return reduce(layout, parts, down=terms.down, merge=terms.merge).tobytes()
        except NonFinite:
            return b""


def _key(update: Update) -> tuple[int, int, str]:
    return update.header.fragment, update.header.round, update.header.island
