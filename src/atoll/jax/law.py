"""The law of a round for one piece of a parameter tree, inside a program.

The text is that of `algorithm`; here it gets its axes. `local` has the islands first;
the anchor has none. A *folded* array is as the codec of the way up takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from atoll.algorithm import adopt, compress, merge, outer
from atoll.algorithm.arithmetic import flush
from atoll.errors import UsageError
from atoll.jax.codecs import Encoded, cast, codec
from atoll.settings import RunSettings

MOST_CORRECTIONS = 65_536
MOST_ADAM_MOMENTUM = 0.9997
"""0.9997**65536 is below 2**-25: by then the correction is 1 in fp32."""


@dataclass(frozen=True)
class Cut:
    """How the reduction of a folded piece is spread over inner steps."""

    axis: int
    size: int
    """Elements along the axis that one inner step reduces."""

    length: int

    def start(self, age: Array) -> Array:
        """Return where the slice of this age starts; the last ones may overlap."""
        return jnp.minimum(age * self.size, self.length - self.size)


def cut(shape: tuple[int, ...], spec: tuple[object, ...], *, into: int) -> Cut:
    """Return how to cut a folded piece into slices of one size: with least to spare.

    Among axes that lie on no axis of the mesh, where there is one.
    """
    free = [i for i in range(len(shape)) if i >= len(spec) or spec[i] is None]
    axis = min(free or range(len(shape)), key=lambda i: -(-shape[i] // into) / shape[i])
    return Cut(axis, -(-shape[axis] // into), shape[axis])


class Law:
    """What the settings make of pseudo-gradients, means and local weights."""

    def __init__(self, settings: RunSettings) -> None:
        _require_available(settings)
        self.up = codec(settings.wire.up, key="wire.up")
        self.down = codec(settings.wire.down, key="wire.down")
        self.feeds_back = settings.wire.error_feedback
        self.decay = settings.wire.error_feedback_decay
        self.outer = settings.outer
        self.sync = settings.sync
        self.rebases = settings.sync.adopt == "rebase" and settings.sync.overlap_steps
        self.num_velocities = {"sgd": 0, "adam": 2}.get(settings.outer.optimizer, 1)
        if settings.outer.optimizer == "adam":
            self._corrections = _corrections(settings.outer.momentum)

    def seal(
        self, anchor: Array, local: Array, residual: Array | None, dtype: str
    ) -> tuple[Encoded, Array | None]:
        """Return what the islands send of a piece, and what encoding lost."""
        loaded = cast(anchor, dtype)[None]
        pseudo = adopt.pseudo_gradient(loaded, local.astype(jnp.float32))
        if residual is None:
            return self.up.encode(self.up.fold(pseudo, lead=1)), None
        sent: list[Encoded] = []

        def roundtrip(wanted: Array) -> Array:
            sent.append(self.up.encode(self.up.fold(wanted, lead=1)))
            return self.up.unfold(self.up.decode(sent[0]), wanted.shape[1:], lead=1)

        _, left = compress.seal(pseudo, residual, roundtrip, decay=self.decay)
        return sent[0], left

    def merge(self, values: Array) -> Array:
        """Return one value of many, whose first axis is the islands' in their order."""
        flushed = flush(values)
        if self.outer.merge == "trimmed":
            return merge.trimmed(list(flushed))
        total = ordered_sum(flushed)
        return (
            total if len(values) == 1 else flush(total / _unfolded(len(values), total))
        )

    def step(
        self, anchor: Array, mean: Array, velocity: tuple[Array, ...], round_: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return anchor and velocity after the outer step of a round."""
        agreed = self.down.roundtrip(mean)
        change, velocity = self._change(agreed, velocity, round_)
        return outer.apply(anchor, change), velocity

    def adopt(self, anchor: Array, local: Array, at_seal: Array | None) -> Array:
        """Return the local weights once the outcome is known, in their own dtype."""
        now = local.astype(jnp.float32)
        if self.sync.adopt == "mix":
            agreed = jnp.broadcast_to(anchor, now.shape)
            moved = adopt.mix(agreed, now, keep_local=self.sync.keep_local)
        elif at_seal is None:
            moved = flush(jnp.broadcast_to(anchor, now.shape))
        else:
            moved = adopt.rebase(anchor[None], now, at_seal.astype(jnp.float32))
        return moved.astype(local.dtype)

    def _change(
        self, mean: Array, velocity: tuple[Array, ...], round_: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        lr, momentum = self.outer.lr, self.outer.momentum
        if self.outer.optimizer == "sgd":
            return outer.sgd(mean, lr=lr), ()
        if self.outer.optimizer == "adam":
            scalars = self._adam_scalars(round_, mean)
            first, second = velocity
            return outer.adam_step(
                mean,
                (first, second),
                lr=lr,
                momentum=momentum,
                scalars=scalars,
                sqrt=jnp.sqrt,
            )
        text = (
            outer.nesterov if self.outer.optimizer == "nesterov" else outer.heavy_ball
        )
        change, moved = text(mean, velocity[0], lr=lr, momentum=momentum)
        return change, (moved,)

    def _adam_scalars(self, round_: Array, like: Array) -> outer.AdamScalars:
        """Return the scalars of a round that is known only when the program runs."""
        table = jnp.asarray(self._corrections, jnp.float32)
        row = table[jnp.minimum(round_, len(self._corrections) - 1)]
        first, second = (_unfolded(each, like) for each in row)
        return outer.AdamScalars(outer.ADAM_BETA2, outer.ADAM_EPS, first, second)


def ordered_sum(values: Array) -> Array:
    """Return the sum along the first axis: the tree of `algorithm.merge`, by levels.

    Neighbours are added, then neighbours of these; what has none waits. That is the
    tree whose first half is the largest power of two below the number of values.
    """
    while (number := len(values)) > 1:
        paired = flush(values[0 : number - 1 : 2] + values[1:number:2])
        values = jnp.concatenate([paired, values[-1:]]) if number % 2 else paired
    return values[0]


def _unfolded(value: Array | float, like: Array) -> Array:
    """Return an array of one value that the compiler must take for any array.

    It divides by a scalar by multiplying with its reciprocal, which is another number
    in a third of all cases.
    """
    return lax.optimization_barrier(jnp.broadcast_to(jnp.float32(value), like.shape))


def _corrections(momentum: float) -> list[tuple[float, float]]:
    """Return Adam's corrections of every outer step, until both are 1."""
    rows: list[tuple[float, float]] = []
    while not rows or (min(rows[-1]) < 1.0 and len(rows) < MOST_CORRECTIONS):
        scalars = outer.adam_corrections(momentum=momentum, count=len(rows) + 1)
        rows.append((scalars.correction1, scalars.correction2))
    return rows


def _require_available(settings: RunSettings) -> None:
    if settings.outer.merge == "radial":
        raise UsageError(
            "outer.merge='radial' needs norms of whole tensors in fp64, which a "
            "program of JAX does not have. Choose merge='mean' or 'trimmed'."
        )
    if settings.outer.weight != "uniform":
        raise UsageError(
            f"outer.weight={settings.outer.weight!r} has no meaning where all islands "
            "make the same inner steps. Choose weight='uniform'."
        )
    momentum = settings.outer.momentum
    if settings.outer.optimizer == "adam" and momentum > MOST_ADAM_MOMENTUM:
        raise UsageError(
            f"outer.momentum={momentum} with outer.optimizer='adam' is corrected for "
            f"more than {MOST_CORRECTIONS} rounds, which a program of JAX has no table "
            f"for. Choose at most {MOST_ADAM_MOMENTUM}."
        )
