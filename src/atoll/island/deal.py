"""The rows that a run deals to an island, from a claim to the update that holds them.

All turns are on one tape, in the order of claims. Positions on it only grow:

    stepped <= given <= drawn <= end

    end      turns that the run has dealt to this island
    drawn    turns that a loader has fetched, perhaps ahead of the loop
    given    turns that the loop has been given
    stepped  turns of inner steps

Rule 1: an inner step has the turns that the loop was given before it. The tape marks
        each inner step, so an update of some inner steps has their turns: carried work,
        departing updates and restored work need no other rule.
Rule 2: a claim has the number after the last one that was answered with turns. So a
        repeat is the same claim, and an exact resume is dealt the same turns again.
Rule 3: turns that a loader has fetched ahead are not given: a loop that begins again
        gets them, and the run deals them to others when the island has left.
Rule 4: of several ranks that read data, rank r of R has every R-th turn. All have the
        same tape, which grows in collective calls only.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from atoll.data import Ask, Claim, DataSpec, RunOrder, Spans
from atoll.data.ledger import MAX_WANT
from atoll.data.order import I64
from atoll.data.spans import intersection
from atoll.errors import AtollError, AtollWarning, UsageError
from atoll.exchange.base import Dealer
from atoll.runtime import Future, Runtime
from atoll.settings import RunSettings
from atoll.wire.header import MAX_CURSOR_BYTES

Interval = tuple[int, int]

READ_AHEAD = 8192
"""Turns whose rows are computed together: a vectorised call has a fixed cost."""


class Tape:
    """Intervals of turns in the order of claims, found by position."""

    def __init__(self, intervals: Iterable[Interval] = (), *, start: int = 0) -> None:
        self.start = self.end = start
        self._intervals: list[Interval] = []
        self._ends: list[int] = []
        """The position after each interval."""

        self.extend(intervals)

    def extend(self, intervals: Iterable[Interval]) -> None:
        """Append intervals."""
        for first, last in intervals:
            self.end += last - first
            self._intervals.append((first, last))
            self._ends.append(self.end)

    def between(self, start: int, stop: int) -> list[Interval]:
        """Return the intervals from one position to another, in their order."""
        intervals: list[Interval] = []
        index = bisect_right(self._ends, start)
        while start < stop:
            last, end = self._intervals[index][1], self._ends[index]
            intervals.append((last - (end - start), last - max(0, end - stop)))
            start, index = end, index + 1
        return intervals

    def trim(self, position: int) -> None:
        """Forget the turns before a position."""
        count = bisect_right(self._ends, position)
        if count:
            del self._intervals[:count], self._ends[:count]
        if position > self.start:
            self.start = position
            if self._intervals:
                last = self._intervals[0][1]
                self._intervals[0] = last - (self._ends[0] - position), last

    def cut(self, position: int, *, before: int) -> None:
        """Remove turns that are not below `before`, from a position on."""
        later = self.between(position, self.end)
        count = bisect_right(self._ends, position)
        start = self._ends[count - 1] if count else self.start
        before_cut = self.between(start, position)
        del self._intervals[count:], self._ends[count:]
        self.end = self._ends[-1] if self._ends else self.start
        below = [(first, min(last, before)) for first, last in later if first < before]
        self.extend([*before_cut, *below])


class DealtRows:
    """The rows of one process: its part of the tape, as its loop takes them.

    Call `take` for rows, `give` when the loop gets them. Only the thread that trains.
    """

    def __init__(self, tape: Tape, position: int, refill: Callable[[], bool]) -> None:
        self.tape, self.refill = tape, refill
        """`refill` adds turns to the tape, and returns False if there are none."""

        self.data: DataSpec | None = None
        """The dataset; None before the loop has shown it."""

        self._part, self._parts = 0, 1
        self._order: RunOrder | None = None
        self._base = position
        """The position at which the first group of one turn per rank begins."""

        self.is_over = False
        """Whether the run had no more rows when the loop, or its loader, asked."""

        self._num_drawn = self._num_given = 0
        self._ahead, self._ahead_from = np.empty(0, np.int64), 0
        """Row numbers of this rank, from its turn `_ahead_from` on."""

    def begin(self, data: DataSpec, settings: RunSettings) -> None:
        """Set the dataset, once it is known."""
        section = settings.data
        self.data = data
        self.forget_ahead()
        if data.rows is not None:
            self._order = RunOrder(
                rows=data.rows, seed=section.seed, is_shuffled=section.shuffle
            )

    def share(self, part: int, parts: int) -> None:
        """Set which turns are this process's: of every `parts` one."""
        self._part, self._parts = part, parts

    @property
    def position(self) -> int:
        """The position up to which the loop has been given turns, on all ranks."""
        return self._base + self._num_given * self._parts

    @property
    def drawn(self) -> int:
        """The position up to which loaders have fetched."""
        return self._base + self._num_drawn * self._parts

    @property
    def num_fetched(self) -> int:
        """Rows that were taken, and that the loop has not been given."""
        return self._num_drawn - self._num_given

    def restart(self) -> None:
        """Take the rows again that the loop has not been given."""
        self._num_drawn = self._num_given
        self.forget_ahead()

    def forget_ahead(self) -> None:
        """Read the tape again: it has changed."""
        self._ahead = self._ahead[:0]

    def take(self, count: int) -> I64:
        """Return at least one row number and at most `count`; none at the end.

        Those of a stream are numbers of its items. At the tape's end this waits for the
        run.
        """
        while not (available := self._available()):
            if not self.refill():
                self.is_over = True
                return np.empty(0, np.int64)
        count = min(count, available)
        if self._num_drawn + count > self._ahead_from + len(self._ahead):
            self._read_ahead(max(count, READ_AHEAD))
        first = self._num_drawn - self._ahead_from
        self._num_drawn += count
        return self._ahead[first : first + count]

    def give(self, count: int) -> None:
        """Note that the loop has got the next `count` rows that were taken."""
        self._num_given = min(self._num_given + count, self._num_drawn)

    def _available(self) -> int:
        return (self.tape.end - self._base) // self._parts - self._num_drawn

    def _read_ahead(self, count: int) -> None:
        count = min(count, self._available())
        start = self.drawn
        intervals = self.tape.between(start, start + count * self._parts)
        turns = [np.arange(first, last, dtype=np.int64) for first, last in intervals]
        own_turns = np.concatenate(turns)[self._part :: self._parts]
        order = self._order
        self._ahead = own_turns if order is None else order.rows_at(own_turns)
        self._ahead_from = self._num_drawn


@dataclass(frozen=True, kw_only=True)
class DealtTurns:
    """Turns that the run has dealt to an island, for its other ranks."""

    start: int
    """The position of the first of them."""

    intervals: tuple[Interval, ...]
    data: DataSpec

    @property
    def end(self) -> int:
        return self.start + sum(last - first for first, last in self.intervals)

    def to_message(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "start": self.start,
            "intervals": [list(interval) for interval in self.intervals],
            "rows": self.data.rows,
            "fingerprint": self.data.fingerprint,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> DealtTurns:
        """Return the value of `to_message`."""
        return cls(
            start=int(message["start"]),
            intervals=tuple((int(a), int(b)) for a, b in message["intervals"]),
            data=DataSpec(rows=message["rows"], fingerprint=message["fingerprint"]),
        )


@dataclass(frozen=True, kw_only=True)
class SavedDeal:
    """The rows of an island in a checkpoint."""

    start: int
    """The position of the first turn that the checkpoint holds."""

    intervals: tuple[Interval, ...]
    """The tape from there on."""

    marks: tuple[Interval, ...]
    """Inner steps, and the position after each of them."""

    stepped: int
    number: int
    """Of the last claim."""

    def to_tree(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "start": self.start,
            "intervals": [list(interval) for interval in self.intervals],
            "marks": [list(mark) for mark in self.marks],
            "stepped": self.stepped,
            "number": self.number,
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> SavedDeal:
        """Return the value of `to_tree`."""
        return cls(
            start=int(tree["start"]),
            intervals=tuple((int(a), int(b)) for a, b in tree["intervals"]),
            marks=tuple((int(a), int(b)) for a, b in tree["marks"]),
            stepped=int(tree["stepped"]),
            number=int(tree["number"]),
        )

    def work_since(self, steps: int | None, *, before_steps: int) -> SavedDeal:
        """Return the turns of the inner steps after `steps` alone; None: of none.

        `steps` and the marks of the result count the steps of all incarnations.
        """
        marks = [(step + before_steps, position) for step, position in self.marks]
        start = (
            self.stepped if steps is None else _position_at(marks, steps, self.start)
        )
        tape = Tape(self.intervals, start=self.start)
        return SavedDeal(
            start=start,
            intervals=tuple(tape.between(start, self.stepped)),
            marks=tuple(mark for mark in marks if mark[1] > start),
            stepped=self.stepped,
            number=self.number,
        )


class Deal:
    """The rows of an island: claims them, and tells which rows an update holds.

    Only the thread that trains calls it; claims are made in the background.
    """

    def __init__(
        self,
        dealer: Dealer,
        ask: Ask,
        settings: RunSettings,
        runtime: Runtime,
        *,
        num_fragments: int,
        saved: SavedDeal | None = None,
        unsettled: Spans | None = None,
    ) -> None:
        """`ask` has the island, and the number of its last claim that is known.

        `unsettled` are turns that the run has dealt to the island's name, and that no
        round has: they are dealt again, except those of `saved`. None: an exact resume.
        """
        self._dealer, self._ask, self._runtime = dealer, ask, runtime
        self._settings = settings
        saved = saved or SavedDeal(
            start=0, intervals=(), marks=(), stepped=0, number=ask.number
        )
        self._number = saved.number if unsettled is None else ask.number
        self._last_known = ask.number
        """The last claim that an incarnation before has made."""

        self._tape = Tape(saved.intervals, start=saved.start)
        if unsettled is not None:
            self._tape.extend(unsettled - Spans(saved.intervals))
        self._marks = list(saved.marks)
        self.rows = DealtRows(self._tape, saved.stepped, self.refill)
        """The rows of the process that talks to the run."""

        self._data: DataSpec | None = None
        """As the loop has given it; None before that."""

        self._pending: Future[Claim] | None = None
        """The answer of a claim in the background."""

        self._pending_number = 0
        self._window = 0
        """Turns of the last window."""

        self._stepped = self._sealed_at = saved.stepped
        self._next_item = 0
        """The item of a stream that its reader comes to next."""

        self._dropped = [Spans()] * num_fragments
        self._has_warned = False
        self.wait_for_rows: Callable[[], bool] = lambda: False
        """Waits until rows of islands that are gone may be free; False: the loop ends.

        No row is free then, and the claim has not said that none can return."""

        self.is_over = False
        """Whether the run had no more rows when the loop asked."""

    def open(self, data: DataSpec) -> DealtRows:
        """Describe the data to the run, and return this process's rows.

        Raises:
            UsageError: the run has another dataset, or this island had.
        """
        if self._data is not None and self._data != data:
            raise UsageError(
                f"The loop has sharded {_described(self._data)}, and now "
                f"{_described(data)}: a run deals out one dataset. "
                "Shard the training data only."
            )
        if self._data is None:
            self.rows.begin(self._open(data), self._settings)
            self._data = data
        return self.rows

    def end_stream(self, rows: int) -> None:
        """Note that the stream has only `rows` items, and no turns beyond."""
        data = self._open(DataSpec(rows=rows))
        self._tape.cut(self.rows.position, before=rows)
        self.rows.begin(data, self._settings)
        self.rows.restart()

    def stand_at(self, item: int) -> None:
        """Note where the reader of a stream stands: claims are for items after it."""
        self._next_item = item

    @property
    def start(self) -> int:
        """The position of the first turn that is not in an inner step."""
        return self._stepped

    def dealt_since(self, position: int) -> DealtTurns:
        """Return the turns of the tape from a position on, once the data is known."""
        assert self.rows.data is not None
        return DealtTurns(
            start=position,
            intervals=tuple(self._tape.between(position, self._tape.end)),
            data=self.rows.data,
        )

    def stepped(self, inner_steps: int) -> None:
        """Make the given turns those of an inner step."""
        position = self.rows.position
        if position > self._stepped:
            self._stepped = position
            self._marks.append((inner_steps, position))

    def cursor(self, first_step: int, last_step: int) -> bytes:
        """Return the packed turns of the inner steps after one, up to another.

        Raises:
            UsageError: they are too many intervals for a header.
        """
        spans = self._between(first_step, last_step)
        packed = spans.pack()
        if len(packed) > MAX_CURSOR_BYTES:
            raise UsageError(
                f"A window has {spans.num_spans} separate units of data, and a header "
                f"holds {MAX_CURSOR_BYTES} bytes of them. Raise data.unit_rows above "
                f"{self._settings.data.unit_rows}."
            )
        return packed

    def note_seal(self, fragment: int) -> None:
        """Claim the rows of the next window in the background, if they are needed."""
        if self._data is None:
            self._warn_unused()
            return
        if fragment:
            return  # once per window
        self.absorb()
        position = self._stepped
        self._window = position - self._sealed_at or self._window
        self._sealed_at = position
        missing = self._window - (self._tape.end - self.rows.drawn)
        if missing <= 0 or self._pending is not None or self.is_over:
            return
        ask, self._pending = self._next_ask(missing), self._runtime.future()
        self._pending_number = ask.number
        self._runtime.spawn(
            partial(_answer, self._dealer, ask, self._pending), name="atoll-claim"
        )

    def trim(self, settled_steps: int) -> None:
        """Forget the turns of inner steps that no further update has to hold."""
        position = _position_at(self._marks, settled_steps, self._tape.start)
        self._tape.trim(min(position, self._stepped))
        self._marks = [mark for mark in self._marks if mark[0] > settled_steps]

    def drop(self, fragment: int, first_step: int, last_step: int) -> None:
        """Note that the work of these inner steps is lost, and that no round has it.

        Rows whose work is lost in every fragment are dealt again at the end.
        """
        dropped = self._between(first_step, last_step)
        self._dropped[fragment] = self._dropped[fragment] | dropped

    def refill(self) -> bool:
        """Add turns to the tape; return False if the run has none for this island."""
        if self.absorb(waits=True):
            return True
        if self.is_over:
            return False
        while True:
            ask = self._next_ask(self.rows.drawn - self._sealed_at)
            claim = self._dealer.claim(ask)
            if self._put(ask.number, claim) or self._deal_dropped():
                return True
            if self._number < self._last_known:
                self._number += 1  # its turns were released when the island had left
                continue
            if claim.is_over or not self.wait_for_rows():
                self.is_over = True
                return False
            if self.absorb(waits=True):  # a window was sealed while this one waited
                return True

    def absorb(self, *, waits: bool = False) -> bool:
        """Add the turns of a claim in the background, once it is answered.

        Its error is dropped: a loop without rows claims again, and gets it then.
        """
        pending = self._pending
        if pending is None or not (waits or pending.done()):
            return False
        self._pending = None
        try:
            claim = pending.result()
        except AtollError:
            return False
        return self._put(self._pending_number, claim)

    def save(self) -> SavedDeal:
        """Return the tape from the last settled turn on, for a checkpoint."""
        tape = self._tape
        return SavedDeal(
            start=tape.start,
            intervals=tuple(tape.between(tape.start, tape.end)),
            marks=tuple(self._marks),
            stepped=self._stepped,
            number=self._number,
        )

    def _open(self, data: DataSpec) -> DataSpec:
        return self._dealer.open_data(self._ask.island, self._ask.incarnation, data)

    def _next_ask(self, turns: int) -> Ask:
        """Return the next claim, of as many units as hold these turns."""
        want = max(1, -(-turns // self._settings.data.unit_rows))
        number = self._number + 1
        return replace(
            self._ask, number=number, want=min(want, MAX_WANT), start=self._next_item
        )

    def _put(self, number: int, claim: Claim) -> bool:
        """Add the turns of a claim; without turns it has not used its number.

        A claim that was answered twice is added once.
        """
        if not claim.spans or number <= self._number:
            return False
        self._number += 1
        self._tape.extend(claim.spans)
        return True

    def _deal_dropped(self) -> bool:
        """Add the turns whose work was lost; without any, the rows are over."""
        again = intersection(self._dropped)
        self._dropped = [spans - again for spans in self._dropped]
        self._tape.extend(again)
        return bool(again)

    def _between(self, first_step: int, last_step: int) -> Spans:
        start = _position_at(self._marks, first_step, self._tape.start)
        stop = _position_at(self._marks, last_step, self._tape.start)
        return Spans(self._tape.between(start, stop))

    def _warn_unused(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"data.order='run': the run owns the data order, and island "
            f"{self._ask.island!r} has asked for no rows. Shard its training data "
            "with atoll.torch.shard or atoll.data.batches, or set "
            "data.order='islands' in the next run.",
            AtollWarning,
            stacklevel=2,
        )


def _answer(dealer: Dealer, ask: Ask, future: Future[Claim]) -> None:
    try:
        future.set_result(dealer.claim(ask))
    except BaseException as exc:  # the thread that trains learns of it
        future.set_exception(exc)


def _position_at(marks: Sequence[Interval], steps: int, start: int) -> int:
    """Return the position after an inner step."""
    index = bisect_right(marks, steps, key=lambda mark: mark[0])
    return marks[index - 1][1] if index else start


def require_same_data(leaders: DataSpec, data: DataSpec) -> None:
    """Return if the data of a rank is that of its leader.

    Raises:
        UsageError: it has another length.
    """
    if leaders.rows != data.rows:
        raise UsageError(
            f"This rank's data is {_described(data)}, and its leader's is "
            f"{_described(leaders)}. Give all ranks the same data."
        )


def _described(data: DataSpec) -> str:
    rows = "a stream" if data.rows is None else f"{data.rows:,} rows"
    return f"{rows} ({data.fingerprint})" if data.fingerprint else rows
