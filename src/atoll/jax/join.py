"""A loop of JAX as one island of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.island import join_run
from atoll.island.resumed import tell_fresh
from atoll.jax.island import Island
from atoll.jax.leaves import Tree
from atoll.jax.model import JaxConstants, JaxModel
from atoll.jax.resuming import OptimizerPart, keeping_of
from atoll.jax.view import JaxView

OnEnd = Literal["raise", "flag"]
P = TypeVar("P")


def join(
    params: P,
    run: MemoryRun | str | None = None,
    *,
    optimizer: Tree = None,
    island: str | None = None,
    on_end: OnEnd = "raise",
    checkpoint: object = None,
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
        run: a `MemoryRun`, a coordinator's address, an object store's URL or a path, or
            None to read ATOLL_RUN; "none" trains alone.
        optimizer: the optimizer's state, for checkpoints; any tree.
        island: this island's name in the run; None reads ATOLL_ISLAND, and without it
            lets the run choose one.
        on_end: "raise" ends the loop with `RunEnded`, which the `with` block swallows;
            "flag" sets `island.should_stop`.
        checkpoint: a directory, or an `atoll.checkpoint.Policy`: what is there is
            restored, and saved again as the policy says.
        names: from paths in the tree to the run's names, in the run's order; or a list
            of paths, if only the order differs. A path that ends in a dot stands for
            all that begin with it. What is not listed follows, under its path.
        frozen: paths of leaves that are not trained: compared, and never sent.
        buffers: paths of floating leaves that are no parameters, such as the statistics
            of a normalisation: averaged as they are.

    Raises:
        ModelError: the tree is not the run's, naming the array and both sides.
        UsageError: an argument is impossible, the name is taken, or the checkpoint is
            of another run.
        CorruptError: there are checkpoints, and none is valid.
    """
    if on_end not in ("raise", "flag"):
        raise UsageError(f"on_end={on_end!r} is not one of raise, flag.")
    model = JaxModel.of(params, names=names, frozen=frozen, buffers=buffers)
    view = JaxView(model, params)
    kept = OptimizerPart(optimizer, is_kept=checkpoint is not None)
    keeping = keeping_of(checkpoint, view, kept, run)
    constants = JaxConstants(model, params)
    host = join_run(
        run, view, model.spec, island=island, keeping=keeping, constants=constants
    )
    if keeping is None:
        tell_fresh(host.joined, is_fresh=True)
    else:
        keeping.begin(host)
    return Island(host, view, kept, on_end=on_end, keeping=keeping)
