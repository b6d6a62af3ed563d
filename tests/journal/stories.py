"""Stories: what happens to a run, step by step, told twice.

Once on a disk that never fails, for what is true after each step; and once on a disk
that crashes or fills up, whose journal must then say something that was true: no
earlier than the last promise, no later than the step that failed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache

from atoll.disk import Data
from atoll.errors import DiskFull, UsageError
from atoll.journal import Journal
from atoll.simulate.scheduler import ProcessDead
from atoll.simulate.world import SimDisk
from tests.journal.runs import Run, View, view

Act = Callable[[Run], None]

ACTS: dict[str, tuple[Act, bool]] = {
    "create": (Run.create_or_open, True),
    "found": (Run.found, True),
    "join a": (lambda run: run.join("a"), False),
    "join b": (lambda run: run.join("b"), False),
    "leave a": (lambda run: run.leave("a"), False),
    "epoch": (Run.set_epoch, False),
    "sync": (lambda run: run.journal.sync(), True),
    "seal": (lambda run: run.journal.seal(), False),
    "small": (lambda run: run.commit(0, value=0.5), True),
    "other small": (lambda run: run.commit(0, value=0.25, down="bf16"), True),
    "large": (lambda run: run.commit(1, value=0.125), True),
    "part": (lambda run: run.commit_part(0, value=0.5, buffer=3), True),
    "void": (lambda run: run.commit(0, is_void=True), True),
    "draft": (lambda run: run.draft(0, "a"), False),
    "draft another": (lambda run: run.draft(1, "a", value=2.0), False),
    "stage small": (lambda run: run.stage(0, "a"), True),
    "stage large": (lambda run: run.stage(1, "a"), True),
    "compact small": (lambda run: run.journal.compact(0), False),
    "compact large": (lambda run: run.journal.compact(1), False),
}
"""What can happen, and whether it promises all that happened so far."""

BEGINNING = ("create", "found")
EVERYTHING = (
    *BEGINNING,
    "join a",
    "small",
    "large",
    "join b",
    "epoch",
    "sync",
    "seal",
    "draft",
    "stage small",
    "seal",
    "compact small",
    "other small",
    "void",
    "draft another",
    "stage large",
    "compact large",
    "seal",
    "leave a",
    "seal",
    "large",
    "large",
    "part",
    "compact small",
    "part",
    "compact large",
    "void",
    "part",
    "small",
)


@cache
def truth(story: tuple[str, ...]) -> tuple[View, ...]:
    """Return what is true before the first step and after each one."""
    run = Run(SimDisk())
    views: list[View] = [()]
    for step in story:
        act, _ = ACTS[step]
        act(run)
        views.append(view(run.journal))
    return tuple(views)


class Telling:
    """A story on a disk that may crash, with what the run was promised."""

    def __init__(self, disk: SimDisk, run: Run | None = None) -> None:
        self.run, self._disk = run or Run(disk), disk
        self.told: tuple[str, ...] = ()
        """The steps that happened, as the journal says."""

        self._promised = 0
        self._failing: tuple[str, ...] = ()
        """The step that was going on when the process died."""

    def step(self, step: str) -> None:
        act, is_promise = ACTS[step]
        self._failing = (step,)
        act(self.run)
        self.told, self._failing = (*self.told, step), ()
        if is_promise:
            self._promised = len(self.told)

    def come_back(self, *, is_power_cut: bool) -> None:
        """Reopen after a crash, and hold that the journal tells a promised past."""
        self._disk.crash(is_power_cut=is_power_cut)
        possible = (*self.told, *self._failing)
        try:
            self.run.reopen()
        except UsageError:  # there is no journal
            assert self._promised == 0
            self.told = ()
            return
        seen = view(self.run.journal)
        views = truth(possible)
        allowed = [n for n in range(self._promised, len(views)) if views[n] == seen]
        assert allowed, f"after {possible} and {self._promised} promised: {seen}"
        # What a journal has said once, it must say again.
        self.told, self._promised = possible[: allowed[-1]], allowed[-1]
        self._failing = ()
        assert self.run.journal.damage == []
        self.run.check()


def tell_until_crash(
    story: Sequence[str], *, call: int, after: bool, is_power_cut: bool, seed: int
) -> bool:
    """Tell a story, crash at a call of the disk, come back, go on; return if it did.

    The story goes on with the step that crashed, unless that had happened after all.
    """
    disk = SimDisk(rng=random.Random(seed))
    disk.crash_at(call, after=after)
    telling = Telling(disk)
    has_crashed = False
    while len(telling.told) < len(story):
        step = story[len(telling.told)]
        try:
            telling.step(step)
        except ProcessDead:
            has_crashed = True
            telling.come_back(is_power_cut=is_power_cut)
            telling.come_back(is_power_cut=True)
    disk.crash_at(0)
    assert view(telling.run.journal) == truth(tuple(story))[-1]
    telling.run.check()
    return has_crashed


class NoRoom:
    """A disk that has no room at some calls that write, and may have done its work.

    A whole file that it says to have failed at may be there, and is not durable.
    """

    def __init__(
        self, inner: SimDisk, failing: Collection[int] = (), share: float = 0.0
    ) -> None:
        self._inner, self._failing, self._share = inner, failing, share
        self.read, self.names, self.remove = inner.read, inner.names, inner.remove
        self.free_bytes = inner.free_bytes
        self._calls = 0
        self.is_full = False
        """Whether it fails at every call."""

    @property
    def is_over(self) -> bool:
        """Whether it has failed as often as it will."""
        return self._calls >= max(self._failing)

    def fail_in(self, calls: int) -> None:
        """Have no room at that call from now on, counted from 1, and at no other."""
        self._failing = (self._calls + calls,)

    def append(self, name: str, data: Data) -> None:
        is_full = self._is_full()
        part = data[: round(self._share * len(data))] if is_full else data
        if part:
            self._inner.append(name, part)
        self._tell(is_full)

    def sync(self, name: str) -> None:
        is_full = self._is_full()
        self._inner.is_full = is_full and self._share < 1.0
        try:
            self._inner.sync(name)  # which leaves what was appended in doubt
        finally:
            self._inner.is_full = False
        self._tell(is_full)

    def write_new(self, name: str, parts: Iterable[Data]) -> None:
        is_full = self._is_full()
        if not is_full:
            self._inner.write_new(name, parts)
        elif self._share == 1.0:
            self._inner.append(name, b"".join(parts))
        self._tell(is_full)

    def _is_full(self) -> bool:
        self._calls += 1
        return self.is_full or self._calls in self._failing

    def _tell(self, is_full: bool) -> None:
        if is_full:
            raise DiskFull("No room. Free some space.")


def tell_with_no_room(
    story: Sequence[str], *, failing: Collection[int], share: float
) -> bool:
    """Tell a story whose disk has no room at some calls; return if it got there.

    The step that fails changes nothing, is repeated, and the story ends as ever. And
    if the process died at that moment instead, a promised past would come back.
    """
    inner = SimDisk()
    disk = NoRoom(inner, failing, share)
    run = Run(disk)
    for done, step in enumerate(story):
        while not _has_room(run, step):
            if done:
                assert view(run.journal) == truth(tuple(story))[done]
            _die_here(inner, story, done)
    assert view(run.journal) == truth(tuple(story))[-1]
    run.check()
    twin = Run(inner, after=run.after, outcomes=run.outcomes).reopen()
    assert view(twin.journal) == truth(tuple(story))[-1]
    twin.check()
    return disk.is_over


def _has_room(run: Run, step: str) -> bool:
    act, _ = ACTS[step]
    try:
        act(run)
    except DiskFull:
        return False
    return True


def tell_with_no_room_and_crash(
    story: Sequence[str], *, failing: Collection[int], share: float, crash_in: int
) -> bool:
    """Tell a story whose disk fails, then crashes some calls later; return if so.

    The process is killed, comes back, and then the power is cut.
    """
    inner = SimDisk(rng=random.Random(crash_in))
    disk = NoRoom(inner, failing, share)
    telling = Telling(inner, Run(disk))
    has_crashed = False
    while len(telling.told) < len(story):
        try:
            telling.step(story[len(telling.told)])
        except DiskFull:
            if disk.is_over:
                inner.crash_at(inner.calls + crash_in)
        except ProcessDead:
            has_crashed = True
            telling.come_back(is_power_cut=False)
            telling.come_back(is_power_cut=True)
    inner.crash_at(0)
    assert view(telling.run.journal) == truth(tuple(story))[-1]
    telling.run.check()
    return has_crashed


def _die_here(disk: SimDisk, story: Sequence[str], done: int) -> None:
    """Open a copy of what is on the disk, as after a kill."""
    copy = SimDisk()
    for name in disk.names(""):
        copy.write_new(name, [disk.read(name)])
    promises = [n for n in range(1, done + 1) if ACTS[story[n - 1]][1]]
    try:
        seen = view(Journal.open(copy))
    except UsageError:
        assert not promises
        return
    assert seen in truth(tuple(story))[max(promises, default=0) : done + 2]
