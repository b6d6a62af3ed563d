"""The law of a round once more, by loops over numpy arrays: what `diloco` must do.

No slots, no kinds, no programs: islands one after the other, tensors one after the
other, and the codecs of the wire itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll import RunSettings
from atoll.algorithm import adopt, compress, merge, outer
from atoll.algorithm.schedule import due_fragments
from atoll.wire import codec

F32 = NDArray[np.float32]
Tensors = dict[str, F32]


class Reference:
    """Islands with fp32 tensors of their own, and the anchor that they agree on."""

    def __init__(
        self,
        settings: RunSettings,
        parts: Sequence[Sequence[str]],
        first: Tensors,
        num_islands: int,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self.anchor = {name: value.copy() for name, value in first.items()}
        self.islands = [dict(self.anchor) for _ in range(num_islands)]
        self._velocity = {name: (0 * v, 0 * v) for name, v in first.items()}
        self._residual = [{n: 0 * v for n, v in first.items()} for _ in self.islands]
        self._flights: dict[tuple[int, int], Any] = {}
        self.inner_steps = 0

    def step(self, inner: Callable[[int, Tensors], Tensors]) -> None:
        """Let every island make an inner step, and do what is due after it."""
        self.islands = [inner(i, own) for i, own in enumerate(self.islands)]
        self.inner_steps += 1
        overlap = self._settings.sync.overlap_steps
        if overlap:
            self._land(self.inner_steps - overlap)
            self._seal(self.inner_steps)
        else:
            self._seal(self.inner_steps)
            self._land(self.inner_steps)

    def _due(self, sent: int) -> tuple[int, ...]:
        sync = self._settings.sync
        return due_fragments(
            sent, sync_every=sync.sync_every, num_fragments=sync.num_fragments
        )

    def _seal(self, sent: int) -> None:
        wire = self._settings.wire
        for fragment in self._due(sent):
            flight = {}
            for name in self._parts[fragment]:
                updates = []
                for own, residual in zip(self.islands, self._residual, strict=True):
                    pseudo = adopt.pseudo_gradient(self.anchor[name], own[name])
                    if not wire.error_feedback:
                        updates.append(roundtrip(wire.up, pseudo))
                        continue
                    update, residual[name] = compress.seal(
                        pseudo,
                        residual[name],
                        lambda x: roundtrip(wire.up, x),
                        decay=wire.error_feedback_decay,
                    )
                    updates.append(update)
                flight[name] = (updates, [own[name] for own in self.islands])
            self._flights[fragment, sent] = flight

    def _land(self, sent: int) -> None:
        for fragment in self._due(sent):
            for name, (updates, at_seal) in self._flights.pop((fragment, sent)).items():
                mean = roundtrip(self._settings.wire.down, merge.mean(updates))
                self._outer(name, mean, (sent - 1) // self._settings.sync.sync_every)
                for own, before in zip(self.islands, at_seal, strict=True):
                    own[name] = self._adopted(name, own[name], before)

    def _outer(self, name: str, mean: F32, round_: int) -> None:
        chosen = self._settings.outer
        lr, momentum = chosen.lr, chosen.momentum
        velocity, second = self._velocity[name]
        if chosen.optimizer == "sgd":
            change = outer.sgd(mean, lr=lr)
        elif chosen.optimizer == "adam":
            change, self._velocity[name] = outer.adam(
                mean,
                (velocity, second),
                lr=lr,
                momentum=momentum,
                count=round_ + 1,
                sqrt=np.sqrt,
            )
        else:
            text = {"nesterov": outer.nesterov, "heavy_ball": outer.heavy_ball}
            change, velocity = text[chosen.optimizer](
                mean, velocity, lr=lr, momentum=momentum
            )
            self._velocity[name] = velocity, second
        self.anchor[name] = outer.apply(self.anchor[name], change)

    def _adopted(self, name: str, local: F32, at_seal: F32) -> F32:
        sync = self._settings.sync
        if sync.adopt == "mix":
            return adopt.mix(self.anchor[name], local, keep_local=sync.keep_local)
        return adopt.rebase(self.anchor[name], local, at_seal)


def roundtrip(name: str, x: F32) -> F32:
    """Return what remains of a tensor that is sent by a codec of the wire."""
    chosen = codec(name)
    body = np.empty(chosen.body_bytes(x.size), np.uint8)
    out = np.empty(x.size, np.float32)
    chosen.encode(np.ascontiguousarray(x).reshape(-1), body)
    chosen.decode(body, out)
    return out.reshape(x.shape)
