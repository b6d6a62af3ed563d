"""The island of a JAX training loop, and the parts of its checkpoints.

Nothing is changed in place: the loop passes its parameters after every inner step, and
continues with the returned ones. A checkpoint has trees, by the names of their leaves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import jax
import numpy as np

from atoll.checkpoint import Policy
from atoll.errors import RunEnded, UsageError
from atoll.exchange import MemoryRun
from atoll.island import Host, join_run
from atoll.island.checkpoints import (
    CheckpointLike,
    IslandCheckpoints,
    OnSave,
    as_policy,
    warn_fresh_optimizer,
)
from atoll.island.identity import island_seed
from atoll.island.join import is_alone
from atoll.island.signals import Interrupted, Termination
from atoll.jax.model import (
    JaxConstants,
    JaxModel,
    JaxView,
    Tree,
    by_name,
    named_leaves,
    require_here,
    with_leaves,
)
from atoll.settings import RunSettings
from atoll.weights.layout import F32

P = TypeVar("P")
OnEnd = Literal["raise", "flag"]


def join(
    params: P,
    optimizer: Tree = None,
    run: MemoryRun | str | None = None,
    *,
    island: str | None = None,
    on_end: OnEnd = "raise",
    checkpoint: str | os.PathLike[str] | Policy | None = None,
    names: Mapping[str, str] | Sequence[str] = (),
    frozen: Iterable[str] = (),
    buffers: Iterable[str] = (),
) -> Island[P]:
    """Make a tree of parameters one island of a run, and return the island.

    Afterwards `island.params` are the run's weights, with the dtypes and shardings of
    the tree; the first island of an empty run founds it with its own. Every call of
    `island.stepped(params)` is an inner step.

    Args:
        params: a tree of arrays on the devices of this process.
        optimizer: the optimizer's state, for checkpoints; any tree, or None.
        run: a `MemoryRun`, a coordinator's address, an object store's URL or a path, or
            None to read ATOLL_RUN; "none" trains alone.
        island: this island's name in the run; None reads ATOLL_ISLAND, and without it
            lets the run choose one.
        on_end: "raise" ends the loop with `RunEnded`, which the `with` block swallows;
            "flag" sets `island.should_stop`.
        checkpoint: a directory, or an `atoll.checkpoint.Policy`. The newest checkpoint
            there is restored, and new ones are saved by the policy.
        names: from paths in the tree to the run's names, in the run's order; or a list
            of paths, if only the order differs. A path that ends in a dot stands for
            all that begin with it. Other leaves follow, under their paths.
        frozen: paths of leaves that are not trained: compared, and never sent.
        buffers: paths of floating leaves that are no parameters, such as the statistics
            of a normalisation: averaged without an outer step.

    Raises:
        ModelError: the tree is not the run's, naming the array and both sides.
        UsageError: an argument is impossible, the name is taken, or the checkpoint is
            of another run.
        CorruptError: there are checkpoints, and none is valid.
    """
    if on_end not in ("raise", "flag"):
        raise UsageError(f"on_end={on_end!r} is not one of raise, flag.")
    if isinstance(optimizer, MemoryRun | str):
        raise UsageError(
            f"optimizer={optimizer!r} is a run. Pass the run as the third argument or "
            "as run=."
        )
    model = JaxModel.of(params, names=names, frozen=frozen, buffers=buffers)
    view = JaxView(model, params)
    optimizer_part = OptimizerPart(optimizer, is_kept=checkpoint is not None)
    keeping = keeping_of(checkpoint, view, optimizer_part, run)
    constants = JaxConstants(model, params)
    host = join_run(
        run, view, model.spec, island=island, keeping=keeping, constants=constants
    )
    if keeping is None:
        warn_fresh_optimizer(host.joined, is_fresh=True)
    else:
        keeping.begin(host)
    return Island(host, view, optimizer_part, on_end=on_end, keeping=keeping)


@dataclass(frozen=True)
class Evaluation(Generic[P]):
    """An anchor, for `evaluating`."""

    round: int
    """The lowest round over the fragments."""

    params: P
    """The loop's tree with the anchor in it, in the tree's own dtypes."""


class Island(Generic[P]):
    """One island of a run. Use it as a context manager around the training loop."""

    def __init__(
        self,
        host: Host,
        view: JaxView,
        optimizer: OptimizerPart,
        *,
        on_end: str,
        keeping: IslandCheckpoints | None = None,
    ) -> None:
        self._host, self._view, self._optimizer = host, view, optimizer
        self._keeping, self._on_save = keeping, OnSave()
        self._has_saved_at_end, self._saves = False, host.position.saves
        self._on_end = on_end
        self._termination = Termination()
        self._is_evaluating = False
        self._has_begun = self._has_stepped = False

    @property
    def params(self) -> P:
        """The live weights: the run's at joining, then those of the last inner step.

        Read the final weights here: after the last round, `stepped` raises.
        """
        self._has_begun = True
        tree: P = self._view.tree
        return tree

    @property
    def optimizer(self) -> Tree:
        """The optimizer's state as a checkpoint had it, or as it was given last."""
        return self._optimizer.tree

    @property
    def name(self) -> str:
        """This island's name in the run."""
        return self._host.joined.island

    @property
    def slot(self) -> int:
        """A small number that belongs to the island's name throughout the run."""
        return self._host.joined.slot

    @property
    def place(self) -> tuple[int, int]:
        """Which of how many shares of the island's data this process trains on."""
        return (0, 1)

    @property
    def settings(self) -> RunSettings:
        """The run's settings, which all islands share."""
        return self._host.settings

    @property
    def round(self) -> int:
        """The last round that every fragment has committed, as this island knows it."""
        return self._host.round

    @property
    def inner_steps(self) -> int:
        """Inner steps of this island since it joined, or as its checkpoint counts."""
        return self._host.tally.inner_steps

    @property
    def run_steps(self) -> int:
        """The run's schedule step, which a late island takes over when it joins."""
        return self._host.run_steps

    @property
    def run_tokens(self) -> int:
        """Tokens of all islands that have reached the anchor."""
        return self._host.position.tokens

    @property
    def seed(self) -> int:
        """A seed of 63 bits that differs for each island, and not between starts.

        `jax.random.key` takes 32 of them, unless x64 is enabled.
        """
        return island_seed(self._host.joined.run, self.name)

    @property
    def digest(self) -> str:
        """A digest over the anchor and velocity, the same on every island."""
        return self._host.digest

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self._host.has_ended

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end; the only signal with `on_end="flag"`.

        It should when the run is over, and when SIGTERM came inside the `with` block.
        """
        return self._host.has_ended or self._termination.is_asked

    def report(self, *, tokens: int = 0, loss: Any = None, **metrics: Any) -> None:
        """Say what the coming inner step trains on. Never waits for a device.

        Call it once per inner step, before `stepped`.
        """
        tally = self._host.tally
        tally.note_report(tokens, loss, metrics, count="batch.size, not an array")
        tally.tokens += tokens

    def metrics(self) -> dict[str, float]:
        """Return this island's counters and its last report, for any logger.

        Reads a reported array's value, which may wait for a device.
        """
        tally = self._host.tally
        return {
            "atoll/round": self.round,
            "atoll/run_steps": self.run_steps,
            "atoll/run_tokens": self.run_tokens,
            **tally.metrics(),
            **{f"atoll/{name}": float(value) for name, value in tally.reported.items()},
        }

    def stepped(self, params: P, *, optimizer: Tree = None) -> P:
        """Count one inner step that returned `params`; return the next params.

        They are the same arrays, unless an outcome was due: then they are new ones.
        `optimizer` is the optimizer's state now, if a checkpoint is to have it.

        Raises:
            RunEnded: the run is over, and `on_end` is "raise"; `island.params` has the
                parameters.
            UsageError: the loop did not begin with `island.params`, or an array was
                donated.
        """
        self._require_local()
        self._take(params)
        self._optimizer.give(optimizer)
        self._host.stepped()
        if self._keeping is not None and not self._host.has_ended:
            self._keeping.stepped()
            self._keeping.finish()  # all that a loop changes, it has given by now
        self._save_if_asked()
        self._raise_if_ended()
        return self.params

    def sync_now(self, params: P) -> P:
        """Put all work into the open rounds now; return the params to continue with.

        Others keep their schedule, so this may wait for them; it stands for the next
        send of each fragment.
        """
        self._require_local()
        self._take(params)
        self._host.sync_now()
        self._raise_if_ended()
        return self.params

    def leave(self) -> None:
        """Leave the run; work that has not counted goes with departing updates.

        That is work up to the parameters that the island was given last.
        """
        self._require_local()
        if self._keeping is not None and not self._host.has_left:
            self._keeping.leave()
        self._host.leave()
        self._close_keeping()

    def on_save(self, function: Callable[[], object]) -> None:
        """Register a function to call whenever this island must save.

        That is on an operator's command, and on SIGTERM before the island leaves:
        between two inner steps, in the thread that trains.
        """
        self._on_save.add(function)

    def anchor(self) -> dict[str, F32]:
        """Return the agreed weights by the run's names, on the host and in fp32."""
        weights: dict[str, F32] = {}
        for slot in self._host.slots:
            flat, _ = self._read_anchor(slot.index)
            weights |= by_name(slot.layout, flat)
        return weights

    @contextmanager
    def evaluating(self) -> Iterator[Evaluation[P]]:
        """Give the newest anchor as parameters; inside, nothing is trained.

        With overlap the anchor may be a round ahead of the local weights.
        """
        self._require_local()
        read = [self._read_anchor(slot.index) for slot in self._host.slots]
        params: P = self._view.tree_of([flat for flat, _ in read])
        self._is_evaluating = True
        try:
            yield Evaluation(round=min(round for _, round in read), params=params)
        finally:
            self._is_evaluating = False

    def __enter__(self) -> Self:
        self._termination.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._termination.heed()
        # Work before an error may have caused it: then only sealed work counts.
        is_error = isinstance(error, Exception) and not isinstance(error, RunEnded)
        # An inner step that was interrupted may have taken the arrays with it.
        is_torn = error is not None and self._view.was_donated
        departs = not is_error and not is_torn
        try:
            if self._keeping is not None and departs and not self._host.has_left:
                self._keeping.leave()
            if self._returns:
                self._host.pause()
            else:
                self._host.leave(depart=departs)
            self._close_keeping(is_broken=is_error)
        finally:  # a SIGTERM during the farewell does not end it
            self._termination.__exit__(kind, error, trace)
        return isinstance(error, RunEnded | Interrupted)

    @property
    def _returns(self) -> bool:
        """Whether this incarnation is interrupted, and its next resumes bit by bit."""
        is_exact = self._keeping is not None and self._keeping.is_exact
        return is_exact and self._has_saved_at_end and not self._host.has_ended

    def _take(self, params: P) -> None:
        if not self._has_begun:
            raise UsageError(
                "The loop trains parameters that are not the run's. "
                "Begin it with params = island.params."
            )
        self._view.give(params)
        if not self._has_stepped:
            self._view.require_same()  # a mistake shows now, and not at a sync
            self._has_stepped = True

    def _read_anchor(self, fragment: int) -> tuple[F32, int]:
        flat = np.empty(self._host.slots[fragment].layout.elements, np.float32)
        return flat, self._host.read_anchor(fragment, flat)

    def _save_if_asked(self) -> None:
        """Save on an operator's command, and once before the island ends."""
        is_last = self._termination.is_asked and not self._has_saved_at_end
        saves = self._host.position.saves
        is_wanted = saves > self._saves
        self._saves = saves  # a restarted coordinator counts from zero
        if not is_last and not is_wanted:
            return
        self._has_saved_at_end |= is_last
        if self._keeping is not None:
            self._keeping.save_last()
            self._keeping.wait()
        self._on_save()

    def _close_keeping(self, *, is_broken: bool = False) -> None:
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            keeping.abandon() if is_broken else keeping.close()

    def _require_local(self) -> None:
        if self._is_evaluating:
            raise UsageError(
                "The anchor is being evaluated. "
                "Leave the evaluating() block before training, syncing or leaving."
            )

    def _raise_if_ended(self) -> None:
        if not self.should_stop or self._on_end != "raise":
            return
        if self._host.has_ended:
            raise RunEnded(f"The run has reached its last round, {self.round}.")
        raise RunEnded("SIGTERM came: this island leaves the run.")


class ModelPart:
    """The `model` component: the live weights. Implements `Stateful`."""

    def __init__(self, view: JaxView) -> None:
        self._view = view

    def state_dict(self) -> object:
        return state_of(self._view.tree)

    def load_state_dict(self, state: object) -> None:
        self._view.give(restored(self._view.tree, state, "params"))


class OptimizerPart:
    """The `optimizer` component: the loop's last state. Implements `Stateful`."""

    def __init__(self, tree: Tree, *, is_kept: bool) -> None:
        self.tree = tree
        self._is_kept = is_kept and tree is not None
        self._structure: Any = jax.tree_util.tree_structure(tree)
        self._is_known = False

    def give(self, tree: Tree) -> None:
        """Take note of the state after an inner step.

        Raises:
            UsageError: there are checkpoints that need it, and it is not that.
        """
        self.tree = tree
        if self._is_kept and (tree is None or not self._is_known):
            self._require_same()  # later ones are looked at when they are saved

    def state_dict(self) -> object:
        self._require_same()
        return state_of(self.tree)

    def load_state_dict(self, state: object) -> None:
        self.tree = restored(self.tree, state, "optimizer")

    def _require_same(self) -> None:
        if jax.tree_util.tree_structure(self.tree) != self._structure:
            raise UsageError(
                "The island keeps the optimizer's state in its checkpoints, and this "
                "inner step gave another tree or none. "
                "Call island.stepped(params, optimizer=state)."
            )
        self._is_known = True


def keeping_of(
    checkpoint: CheckpointLike | None,
    view: JaxView,
    optimizer: OptimizerPart,
    run: object,
) -> IslandCheckpoints | None:
    """Restore what `checkpoint=` holds, and return what saves it; None without one.

    Raises:
        UsageError: it is neither a policy nor a directory, its trees do not fit, or
            there is no optimizer to save.
        CorruptError: there are checkpoints, and none is valid.
    """
    if checkpoint is None:
        return None
    policy = as_policy(checkpoint)
    if optimizer.tree is None and "optimizer" in policy.chosen():
        raise UsageError(
            "checkpoint= keeps the optimizer, and none was given. Pass its state as "
            "optimizer=, to join and to every stepped; optimizer=() if it has none."
        )
    objects = {"model": ModelPart(view), "optimizer": optimizer}
    return IslandCheckpoints(policy, objects, is_alone=is_alone(run))


def state_of(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by name, for a checkpoint."""
    leaves = dict(named_leaves(tree))
    for name, leaf in leaves.items():
        require_here(name, leaf)
    return leaves


def restored(tree: Tree, state: object, component: str) -> Tree:
    """Return a tree with the leaves that a checkpoint had of it."""
    assert isinstance(state, dict)
    live = dict(named_leaves(tree))
    for name in sorted(live.keys() ^ state.keys()):
        other = "checkpoint" if name in live else "program"
        raise UsageError(
            f"{component} has the leaf {name!r}, which is not in the {other}. "
            "Give the trees that were saved."
        )
    for name, leaf in live.items():
        _require_alike(f"{component}.{name}", leaf, state[name])
    return with_leaves(tree, lambda name, leaf: state[name])


def _require_alike(name: str, live: Any, saved: Any) -> None:
    live_kind, saved_kind = _kind(live), _kind(saved)
    if live_kind != saved_kind:
        raise UsageError(
            f"{name} is {live_kind} here, and {saved_kind} in the checkpoint. "
            "Give the trees that were saved."
        )


def _kind(leaf: Any) -> str:
    if isinstance(leaf, jax.Array | np.ndarray):
        return f"{leaf.dtype} of shape {leaf.shape}"
    return f"a {type(leaf).__name__}"
