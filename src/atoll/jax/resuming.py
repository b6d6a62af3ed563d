"""What a checkpoint of a loop of JAX is made of: trees, by the names of leaves."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from atoll.errors import UsageError
from atoll.island.joining import is_alone
from atoll.island.keeping import Keeping, as_policy
from atoll.jax.leaves import Tree, named_leaves, require_here, with_leaves
from atoll.jax.view import JaxView


class ModelPart:
    """The `model` component: the live weights. Implements `Stateful`."""

    def __init__(self, view: JaxView) -> None:
        self._view = view

    def state_dict(self) -> object:
        return state_of(self._view.tree)

    def load_state_dict(self, state: object) -> None:
        self._view.give(restored(self._view.tree, state, "params"))


class OptimizerPart:
    """The `optimizer` component: what the loop gave of it. Implements `Stateful`."""

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
    checkpoint: object, view: JaxView, optimizer: OptimizerPart, run: object
) -> Keeping | None:
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
    return Keeping(policy, objects, is_alone=is_alone(run))


def state_of(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by name, for a checkpoint."""
    leaves = dict(named_leaves(tree))
    for name, leaf in leaves.items():
        require_here(name, leaf)
    return leaves


def restored(tree: Tree, state: object, what: str) -> Tree:
    """Return a tree with the leaves that a checkpoint had of it."""
    assert isinstance(state, dict)
    live = dict(named_leaves(tree))
    for name in sorted(live.keys() ^ state.keys()):
        where = "checkpoint" if name in live else "program"
        raise UsageError(
            f"{what} has the leaf {name!r}, which is not in the {where}. "
            "Give the trees that were saved."
        )
    for name, leaf in live.items():
        _require_alike(f"{what}.{name}", leaf, state[name])
    return with_leaves(tree, lambda name, leaf: state[name])


def _require_alike(name: str, live: Any, saved: Any) -> None:
    here, there = _kind(live), _kind(saved)
    if here != there:
        raise UsageError(
            f"{name} is {here} here, and {there} in the checkpoint. "
            "Give the trees that were saved."
        )


def _kind(leaf: Any) -> str:
    if isinstance(leaf, jax.Array | np.ndarray):
        return f"{leaf.dtype} of shape {leaf.shape}"
    return f"a {type(leaf).__name__}"
