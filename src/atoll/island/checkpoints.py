"""Checkpoints of an island: when they are written, and how they are restored.

A training loop needs to know nothing of them. Beside each checkpoint, the positions in
the data at the last seals are kept; a step counter in a small file outlives its
process.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from struct import Struct
from typing import Protocol

from atoll.checkpoint import COMPONENTS, Loaded, Policy, Ranks, Saver
from atoll.checkpoint.frameworks import SingleRank
from atoll.checkpoint.loader import read, restore
from atoll.disk.base import translated
from atoll.errors import AtollWarning, UsageError
from atoll.island.host import Host
from atoll.island.identity import island_key
from atoll.island.resume import ResumeReport
from atoll.island.saved_state import SavedIsland, Tree, from_tree, to_tree
from atoll.protocol import JoinReply

CheckpointLike = str | os.PathLike[str] | Policy
"""The argument `checkpoint=` of `join`: a directory, or a policy."""

BeforeSeals = Callable[[Callable[[int, int], None]], None]
"""Registers a callback for every seal: it gets the inner steps made and settled."""

LATE = ("scheduler", "trainer")
"""Components that a loop changes after an inner step was counted, unless it gives all
its state with the step; a scheduler also changes the optimizer's learning rate."""


class IslandComponent:
    """The `island` component: the host's state to save, and the restored one."""

    def __init__(self) -> None:
        self.saved: SavedIsland | None = None
        self.tree: Tree = {}

    def state_dict(self) -> Tree:
        return self.tree

    def load_state_dict(self, state: Tree) -> None:
        self.saved = from_tree(state) if state else None


class CheckpointSubject(Protocol):
    """The subject of checkpoints: a host, or one rank's part of an island."""

    @property
    def round(self) -> int: ...

    @property
    def progress(self) -> tuple[int, int]: ...

    @property
    def settled_steps(self) -> int: ...

    def saving(self, *, is_exact: bool) -> AbstractContextManager[SavedIsland]: ...


class IslandCheckpoints:
    """Restores an island when it joins, and saves it by its policy.

    `late` are the components that `finish` copies, with the optimizer, if they are
    saved; with none of them, `stepped` copies the whole state before it returns.
    """

    def __init__(
        self,
        policy: Policy,
        objects: Mapping[str, object],
        *,
        is_alone: bool,
        ranks: Ranks | None = None,
        late: Iterable[str] = LATE,
    ) -> None:
        self.policy, self._ranks = policy, ranks or SingleRank()
        # The run has the weights, unless this island trains without one.
        default = [name for name in COMPONENTS if is_alone or name != "model"]
        self._component, self._is_alone = IslandComponent(), is_alone
        objects = {**objects, "island": self._component}
        self._saver = policy.saver(objects, default=default, ranks=self._ranks)
        self.is_exact = "model" in self._saver.components
        self._late_if_saved = tuple(late)
        self._late = self._late_components()
        self._has_data = False
        self._late_data: tuple[BeforeSeals, int | None] | None = None
        """For data added after the join: its seal callback, and the counted steps."""

        self._schedulers: list[object] = []
        """Schedulers that were added after the join."""

        self._is_pending = False
        self._loaded = self._restore()
        self._host: CheckpointSubject | None = None
        self._saved_round: int | None = None
        self._counter_file: StepCounterFile | None = None
        self._cursors: DataCursors | None = None

    @property
    def saved(self) -> SavedIsland | None:
        """The island of the checkpoint that was restored, if there was one."""
        return self._component.saved

    def add_scheduler(self, value: object) -> object:
        """Save one more scheduler with the others; return its saved state, or None.

        For a scheduler that needs a joined island. None, too, if the policy has its own
        `scheduler`, or does not save that component.
        """
        if "scheduler" in self.policy.extra or (
            "scheduler" not in self._saver.components
        ):
            return None
        if not self._schedulers:
            self._saver.add("scheduler", self._schedulers)
            self._late = self._late_components("scheduler")
        self._schedulers.append(value)
        if self._loaded is None:
            return None
        saved = read(self._loaded, "scheduler", self._ranks)
        index = len(self._schedulers) - 1
        return saved[index] if isinstance(saved, list) and index < len(saved) else None

    def add_data(self, value: object) -> None:
        """Save the position in the data from now on, and restore the saved position.

        Only for the first data, and if the policy has no `data` itself.
        """
        if "data" in self.policy.extra or "data" not in self._saver.components:
            return
        if self._has_data:
            return
        self._has_data = True
        self._saver.add("data", value)
        if self._loaded is not None:
            restore(self._loaded, {"data": value}, ("data",), self._ranks)
        if self._late_data is not None:
            before_seals, counted = self._late_data
            self._keep_cursors(value, before_seals)
            if counted is not None and not self.restore_cursor(counted):
                warnings.warn(
                    "The island trains rows again that the run has counted: no cursor "
                    f"of its data was saved at {counted} counted inner steps.",
                    AtollWarning,
                    stacklevel=4,
                )

    def _late_components(self, *added: str) -> tuple[str, ...]:
        saved = {*self.policy.extra, *added}
        late = [name for name in self._late_if_saved if name in saved]
        return ("optimizer", *late) if late else ()

    def key(self) -> bytes:
        """Return the key of an island that only its checkpoints identify."""
        return island_key(Path(self.policy.directory), run="", island="")

    def begin(self, host: Host) -> None:
        """Attach a host that has joined, and report how its checkpoint was resumed."""
        counted = self.counted_at(host)
        has_cursors = self.keep_cursors(_before_seals_of(host), counted=counted)
        moves = has_cursors and counted is not None
        cursor = self.restore_cursor(counted) if moves and counted is not None else None
        self.report_resume(host, cursor=cursor)
        self.attach(host, is_leader=True)

    def keep_cursors(self, before_seals: BeforeSeals, *, counted: int | None) -> bool:
        """Save the data's cursor before every seal; return False without data.

        Data added later is put at the cursor of `counted` inner steps, if given.
        """
        self._late_data = before_seals, counted
        data = self.policy.extra.get("data")
        if data is None or "data" not in self._saver.components:
            return False
        self._keep_cursors(data, before_seals)
        return True

    def _keep_cursors(self, data: object, before_seals: BeforeSeals) -> None:
        folder = Path(self.policy.directory) / "cursors"
        if self._ranks.size > 1:
            folder /= f"rank-{self._ranks.rank}"
        self._cursors = cursors = DataCursors(folder, data)
        before_seals(lambda steps, settled: cursors.keep(steps, min_steps=settled))

    def counted_at(self, host: Host) -> int | None:
        """Return the inner steps of the cursor to restore; None: the checkpoint's."""
        resumed = host.resumed
        if resumed is None or resumed.is_exact:
            return None
        steps = resumed.counted[0]
        return steps if steps > resumed.saved[0] else None

    def restore_cursor(self, inner_steps: int) -> bool:
        """Put the data at the cursor of a seal; return False if none was saved."""
        return self._cursors is not None and self._cursors.put_back(inner_steps)

    def report_resume(self, host: Host, *, cursor: bool | None) -> None:
        """Report how the checkpoint was resumed, or that there was none.

        `cursor` is whether the data is at the position that the run has counted.
        """
        directory = Path(self.policy.directory)
        if host.resumed is None:
            warn_fresh_optimizer(host.joined, self._fresh(), directory=directory)
            return
        trained = StepCounterFile.read(directory)
        if not self._is_alone:
            report_resumed(host.joined, host.resumed, trained=trained, cursor=cursor)

    def attach(self, subject: CheckpointSubject, *, is_leader: bool) -> None:
        """Save `subject` from now on; all ranks of an island call this."""
        self._host = subject
        self._saved_round = subject.round if self._loaded else None
        if self._loaded is None:
            self.save(is_first=True)
        if is_leader:
            self._counter_file = StepCounterFile(Path(self.policy.directory))
            self._counter_file.note(*subject.progress)

    def stepped(self) -> None:
        """Record an inner step, and save if a checkpoint is due."""
        host = self._host
        assert host is not None
        if self._counter_file is not None:
            self._counter_file.note(*host.progress)
        if self.policy.is_due(host.round, self._saved_round):
            self.save()

    @property
    def is_unfinished(self) -> bool:
        """Whether a checkpoint waits for the late components of its inner step."""
        return self._is_pending

    def save(self, *, is_first: bool = False) -> None:
        """Save, unless the last one is still being written; `finish` completes it.

        The first one is durable when this returns.
        """
        host = self._host
        assert host is not None
        steps, tokens = host.progress
        metadata = {"round": host.round, "inner_steps": steps, "tokens": tokens}
        late = () if is_first else self._late
        with host.saving(is_exact=self.is_exact) as island:
            self._component.tree = to_tree(island)
            is_begun = self._saver.save(metadata, late=late)
            self._component.tree = {}
        if is_begun:
            self._saved_round, self._is_pending = host.round, bool(late)
        if is_first:
            self._saver.wait()

    def save_last(self) -> None:
        """Wait for the writer, then save: this incarnation is about to end."""
        self._saver.wait()
        self.save()

    def wait(self) -> None:
        """Return when all saved checkpoints are durable."""
        self.finish()
        self._saver.wait()

    def leave(self) -> None:
        """Save the data's cursor when the island publishes its departing update."""
        self.finish()
        host = self._host
        if self._cursors is not None and host is not None:
            self._cursors.keep(host.progress[0], min_steps=host.settled_steps)

    def finish(self) -> None:
        """Add the late components of the pending checkpoint, and start to write it."""
        self._is_pending = False
        self._saver.finish()

    def abandon(self) -> None:
        """Drop a pending checkpoint: the other ranks may not finish theirs."""
        if self._counter_file is not None:
            self._counter_file.close()
        self._saver.__exit__(UsageError, None, None)

    def close(self) -> None:
        """Wait until all saved checkpoints are durable, and stop."""
        if self._counter_file is not None:
            self._counter_file.close()
        self._saver.close()

    def _restore(self) -> Loaded | None:
        """Restore the chosen components, and the weights that an exact resume needs."""
        checkpoint = self._saver.find()
        if checkpoint is None:
            return None
        chosen = set(self._saver.components)
        if checkpoint.weights == "external":
            chosen.discard("model")
        elif "island" in chosen:
            chosen.add("model")
        return self._saver.restore(components=chosen)

    def _fresh(self) -> bool:
        """Return whether the optimizer starts with fresh state."""
        return self._loaded is None or "optimizer" not in self._loaded.restored


def _before_seals_of(host: Host) -> BeforeSeals:
    return lambda act: host.before_seal(
        lambda: act(host.progress[0], host.settled_steps)
    )


def as_policy(checkpoint: CheckpointLike) -> Policy:
    """Return the policy for the argument `checkpoint=` of `join`.

    Raises:
        UsageError: it is neither a policy nor a directory.
    """
    if isinstance(checkpoint, Policy):
        return checkpoint
    if isinstance(checkpoint, str | os.PathLike):
        return Policy(os.fspath(checkpoint))
    raise UsageError(
        f"checkpoint={checkpoint!r} is neither a directory nor an "
        "atoll.checkpoint.Policy. Give one of them."
    )


class OnSave:
    """The callbacks of a program that run when its island has to save."""

    def __init__(self) -> None:
        self._functions: list[Callable[[], object]] = []

    def add(self, function: Callable[[], object]) -> None:
        if not callable(function):
            raise UsageError(f"on_save({function!r}) is no function. Give one.")
        self._functions.append(function)

    def __call__(self) -> None:
        """Call all of them; an error is reported as a warning, and the rest run."""
        for function in self._functions:
            try:
                function()
            except Exception as exc:  # the island must still leave, and be saved
                warnings.warn(
                    f"A function given to on_save failed: {type(exc).__name__}: {exc}",
                    AtollWarning,
                    stacklevel=2,
                )


class DataCursors:
    """Saves the state of an island's data, one small checkpoint per seal."""

    def __init__(self, directory: Path, data: object) -> None:
        self._directory, self._data = directory, data
        self._last = -1

    def keep(self, inner_steps: int, *, min_steps: int) -> None:
        """Save the present cursor, and remove those below `min_steps` inner steps.

        It is durable when this returns, and before the update is sent that may count.
        """
        if inner_steps == self._last:
            return  # several fragments are sealed at the same inner step
        self._last = inner_steps
        self._sweep(min_steps)
        path = self._directory / str(inner_steps)
        with self._saver(path) as saver:
            saver.save_and_wait({"inner_steps": inner_steps})

    def put_back(self, inner_steps: int) -> bool:
        """Put the data at the cursor of `inner_steps`; return False if none exists."""
        path = self._directory / str(inner_steps)
        if not path.is_dir():
            return False
        checkpoint = self._saver(path).find()
        if checkpoint is None:
            return False
        restore(checkpoint, {"data": self._data}, ("data",), SingleRank())
        return True

    def _saver(self, path: Path) -> Saver:
        objects = {"data": self._data}
        return Saver(path, objects, components=["data"], keep=1, ranks=SingleRank())

    def _sweep(self, min_steps: int) -> None:
        with translated(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            for path in self._directory.iterdir():
                if path.name.isdigit() and int(path.name) < min_steps:
                    shutil.rmtree(path)


FILE = "progress"
_COUNTS = Struct("<QQ")


class StepCounterFile:
    """A file with the inner steps and tokens of all incarnations of an island."""

    def __init__(self, directory: Path) -> None:
        path = directory / FILE
        with translated(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(handle, _COUNTS.size)
                self._memory = mmap.mmap(handle, _COUNTS.size)
            finally:
                os.close(handle)

    def note(self, inner_steps: int, tokens: int) -> None:
        """Write the counts. They survive the process, not a crash of the machine."""
        _COUNTS.pack_into(self._memory, 0, inner_steps, tokens)

    def close(self) -> None:
        """Close the file."""
        self._memory.close()

    @classmethod
    def read(cls, directory: Path) -> tuple[int, int]:
        """Return the counts of earlier incarnations; zeros without a file."""
        path = directory / FILE
        with translated(path):
            data = path.read_bytes() if path.exists() else b""
        if len(data) != _COUNTS.size:
            return 0, 0
        inner_steps, tokens = _COUNTS.unpack(data)
        return inner_steps, tokens


log = logging.getLogger("atoll")


def warn_fresh_optimizer(
    joined: JoinReply, is_fresh: bool, *, directory: Path | None = None
) -> None:
    """Warn that the optimizer is fresh, if an earlier incarnation has counted."""
    if not is_fresh or not joined.inner_steps:
        return
    reason = f"{directory} holds no checkpoint of it" if directory else "no checkpoint="
    warnings.warn(
        f"Island {joined.island!r} has counted {joined.inner_steps} inner steps in an "
        f"earlier incarnation, and continues with a fresh optimizer: {reason}. "
        'Give join(..., checkpoint="DIRECTORY") to keep its moments.',
        AtollWarning,
        stacklevel=4,
    )


def report_resumed(
    joined: JoinReply,
    resumed: ResumeReport,
    *,
    trained: tuple[int, int],
    cursor: bool | None,
) -> None:
    """Report how an island was resumed, and the inner steps and tokens it has lost.

    `trained` are its counts before the restart. `cursor` is whether its data is at the
    position that the run has counted; None: the checkpoint's position is right.
    """
    steps, tokens = resumed.saved
    island = joined.island
    if resumed.is_exact:
        again = max(0, trained[0] - steps)
        log.info(
            "island %s resumes exactly from inner step %d; %d inner steps are made "
            "again",
            island,
            steps,
            again,
        )
        return
    if resumed.reason:
        _warn(
            f"Island {island!r} rejoins instead of resuming exactly: {resumed.reason}."
        )
    covered = (max(steps, resumed.counted[0]), max(tokens, resumed.counted[1]))
    lost = (
        max(0, trained[0] - covered[0]) + resumed.lost[0],
        max(0, trained[1] - covered[1]) + resumed.lost[1],
    )
    log.info(
        "island %s rejoins from its checkpoint at inner step %d; the run has counted "
        "%d",
        island,
        steps,
        resumed.counted[0],
    )
    if lost[0]:
        _warn(
            f"Island {island!r} had made {trained[0]} inner steps. The run has counted "
            f"{resumed.counted[0]}, the checkpoint holds {steps}: {lost[0]} inner "
            f"steps with {lost[1]} tokens are lost."
        )
    if cursor is False:
        _warn(
            f"Island {island!r} trains rows again that the run has counted: its data "
            f"is at inner step {steps}, and {resumed.counted[0]} have counted."
        )


def _warn(message: str) -> None:
    warnings.warn(message, AtollWarning, stacklevel=5)
