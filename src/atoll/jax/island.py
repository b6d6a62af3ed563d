"""The island of a JAX training loop, and the parts of its checkpoints.

Nothing is changed in place: the loop passes its parameters after every inner step, and
continues with the returned ones. A checkpoint has trees, by the names of their leaves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import jax
import numpy as np

from atoll.checkpoint import Policy
from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.island import Host, join_run
from atoll.island.checkpoints import (
    CheckpointLike,
    IslandCheckpoints,
    as_policy,
    warn_fresh_optimizer,
)
from atoll.island.handle import TrainedIsland
from atoll.island.join import is_alone
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
    checkpointing = checkpointing_of(checkpoint, view, optimizer_part, run)
    constants = JaxConstants(model, params)
    host = join_run(
        run,
        view,
        model.spec,
        island=island,
        checkpointing=checkpointing,
        constants=constants,
    )
    if checkpointing is None:
        warn_fresh_optimizer(host.joined, is_fresh=True)
    else:
        checkpointing.begin(host)
    return Island(
        host, view, optimizer_part, on_end=on_end, checkpointing=checkpointing
    )


@dataclass(frozen=True)
class Evaluation(Generic[P]):
    """An anchor, for `evaluating`."""

    round: int
    """The lowest round over the fragments."""

    params: P
    """The loop's tree with the anchor in it, in the tree's own dtypes."""


class Island(TrainedIsland, Generic[P]):
    """One island of a run. Use it as a context manager around the training loop."""

    _token_count = "batch.size, not an array"
    _anchor_is_shown = "The anchor is being evaluated."
    _may_sync = False

    def __init__(
        self,
        host: Host,
        view: JaxView,
        optimizer: OptimizerPart,
        *,
        on_end: str,
        checkpointing: IslandCheckpoints | None = None,
    ) -> None:
        super().__init__(host, on_end=on_end, checkpointing=checkpointing)
        self._host, self._view, self._optimizer = host, view, optimizer
        self._has_begun = self._has_stepped = False
        devices = jax.local_devices()
        kind = devices[0].device_kind
        host.counters.machine = f"{len(devices)} x {kind}, jax {jax.__version__}"

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
        self._count_step()
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

    def anchor(self) -> dict[str, F32]:
        """Return the agreed weights by the run's names, on the host and in fp32."""
        weights: dict[str, F32] = {}
        for slot in self._host.slots:
            flat, _ = self._host.read_anchor(slot.index)
            weights |= by_name(slot.layout, flat)
        return weights

    @contextmanager
    def evaluating(self) -> Iterator[Evaluation[P]]:
        """Give the newest anchor as parameters; inside, nothing is trained.

        With overlap the anchor may be a round ahead of the local weights.
        """
        self._require_local()
        read = [self._host.read_anchor(slot.index) for slot in self._host.slots]
        params: P = self._view.tree_of([flat for flat, _ in read])
        self._evaluated_round = min(round for _, round in read)
        try:
            yield Evaluation(round=self._evaluated_round, params=params)
        finally:
            self._evaluated_round = None

    def _is_torn(self) -> bool:
        return self._view.was_donated

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


def checkpointing_of(
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
    # All that a loop changes, it gives with the inner step, and may donate afterwards.
    return IslandCheckpoints(policy, objects, is_alone=is_alone(run), late=())


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
