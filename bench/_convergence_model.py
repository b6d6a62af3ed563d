"""A small language model in numpy, its text, and the inner optimizer of an island.

The text is a random Markov chain of order three over 64 tokens: the next token is drawn
from a random network of the last three. The model is a larger network of the same kind,
so that its loss falls for as long as it trains. Equal seeds give equal bits.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.island.numpy_model import vector_model
from atoll.weights import Layout
from atoll.weights.layout import F32

VOCABULARY, CONTEXT, HIDDEN = 64, 3, 134
MODEL = vector_model(
    {
        **{f"read.{index}.w": (VOCABULARY, HIDDEN) for index in range(CONTEXT)},
        "hidden.bias": (HIDDEN,),
        "head.w": (HIDDEN, VOCABULARY),
        "head.bias": (VOCABULARY,),
    }
)
"""34,502 parameters."""

TEACHER_HIDDEN = 64
SHARPNESS = 4.0
"""Standard deviation of the teacher's logits; a higher one leaves less entropy."""

BATCH = 64
"""Tokens of an inner step."""

HELD_OUT_STEPS = 256

LR, DECAYS, EPSILON, WEIGHT_DECAY = 8e-3, (0.9, 0.99), 1e-8, 0.01
WARMUP_STEPS = 50

_ONE_HOT = np.eye(VOCABULARY, dtype=np.float32)

Tokens = NDArray[np.uint8]


class Text(NamedTuple):
    """Batches by inner step."""

    contexts: Tokens
    """The last three tokens: (steps, batch, context)."""

    following: Tokens
    """The token after them: (steps, batch)."""


@lru_cache(maxsize=16)
def island_text(seed: int, island: int, *, steps: int) -> Text:
    """Return the text of an island, which no other island reads."""
    return _Teacher(seed).write(np.random.default_rng([seed, 1, island]), steps)


@lru_cache(maxsize=16)
def held_out_text(seed: int) -> Text:
    """Return a text that no island reads, as one batch."""
    rng = np.random.default_rng([seed, 2])
    contexts, following = _Teacher(seed).write(rng, HELD_OUT_STEPS)
    return Text(contexts.reshape(1, -1, CONTEXT), following.reshape(1, -1))


class _Teacher:
    """The network that the texts of a seed are drawn from."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        self._reads = rng.standard_normal((CONTEXT, VOCABULARY, TEACHER_HIDDEN))
        head = rng.standard_normal((TEACHER_HIDDEN, VOCABULARY))
        # The square of tanh of the sum of three standard normal values is 0.6 on
        # average.
        self._head = head * SHARPNESS / np.sqrt(0.6 * TEACHER_HIDDEN)

    def write(self, rng: np.random.Generator, steps: int) -> Text:
        """Return a text of as many chains as a batch has tokens."""
        tokens = np.empty((CONTEXT + steps, BATCH), np.uint8)
        tokens[:CONTEXT] = rng.integers(VOCABULARY, size=(CONTEXT, BATCH))
        for step in range(steps):
            contexts = tokens[step : step + CONTEXT]
            tokens[step + CONTEXT] = self._draw(contexts, rng)
        contexts = [tokens[index : index + steps] for index in range(CONTEXT)]
        return Text(np.stack(contexts, axis=2), tokens[CONTEXT:])

    def _draw(self, contexts: Tokens, rng: np.random.Generator) -> NDArray[np.int64]:
        hidden = sum(map(np.ndarray.__getitem__, self._reads, contexts))
        sums = np.exp(np.tanh(hidden) @ self._head).cumsum(axis=1)
        drawn = rng.random(BATCH) * sums[:, -1]
        return np.asarray((sums < drawn[:, None]).sum(axis=1))


class Student:
    """The model of one island, one vector per fragment. Implements `ParameterView`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._layout: Layout = ()
        self.vectors: list[F32] = []

    def lay_out(self, layout: Layout) -> None:
        self._layout = layout
        self.vectors = [np.zeros(part.elements, np.float32) for part in layout]
        self._gradients = [np.zeros_like(vector) for vector in self.vectors]
        self._weights = _tensors(layout, self.vectors)
        self._slopes = _tensors(layout, self._gradients)
        rng = np.random.default_rng([self._seed, 3])
        for spec in MODEL.tensors:
            if spec.name.endswith(".w"):
                fan_in = HIDDEN if spec.name == "head.w" else CONTEXT
                values = rng.standard_normal(spec.shape) / np.sqrt(fan_in)
                self._weights[spec.name][:] = values

    def read(self, fragment: int, out: F32) -> None:
        out[:] = self.vectors[fragment]

    def write(self, fragment: int, values: F32) -> None:
        self._layout[fragment].load(values, self.vectors[fragment])

    def loss(self, text: Text) -> float:
        """Return the mean loss over the first batch of a text, in nats per token."""
        contexts, following = text.contexts[0], text.following[0]
        _, shares = self._forward(contexts)
        chosen = shares[np.arange(len(following)), following].astype(np.float64)
        return float(-np.log(np.maximum(chosen, 1e-30)).mean())

    def gradients(self, contexts: Tokens, following: Tokens) -> list[F32]:
        """Return the gradient of the mean loss of a batch, one vector per fragment."""
        hidden, errors = self._forward(contexts)
        errors[np.arange(len(following)), following] -= 1.0
        errors /= len(following)
        slopes = self._slopes
        np.matmul(hidden.T, errors, out=slopes["head.w"])
        errors.sum(axis=0, out=slopes["head.bias"])
        back = errors @ self._weights["head.w"].T
        back *= 1.0 - hidden * hidden
        back.sum(axis=0, out=slopes["hidden.bias"])
        for index in range(CONTEXT):
            rows = _ONE_HOT[contexts[:, index]]
            np.matmul(rows.T, back, out=slopes[f"read.{index}.w"])
        return self._gradients

    def _forward(self, contexts: Tokens) -> tuple[F32, F32]:
        """Return the hidden values, and the share of each token as the next one."""
        weights = self._weights
        hidden = weights["read.0.w"][contexts[:, 0]]
        for index in range(1, CONTEXT):
            hidden += weights[f"read.{index}.w"][contexts[:, index]]
        hidden += weights["hidden.bias"]
        np.tanh(hidden, out=hidden)
        shares = hidden @ weights["head.w"]
        shares += weights["head.bias"]
        shares -= shares.max(axis=1, keepdims=True)
        np.exp(shares, out=shares)
        shares /= shares.sum(axis=1, keepdims=True)
        return hidden, shares


def _tensors(layout: Layout, vectors: list[F32]) -> dict[str, F32]:
    """Return each tensor of the model as a view of its fragment's vector."""
    tensors = {}
    for fragment, vector in zip(layout, vectors, strict=True):
        parts = zip(fragment.tensors, pairwise(fragment.offsets), strict=True)
        for tensor, (first, last) in parts:
            tensors[tensor.name] = vector[first:last].reshape(tensor.shape)
    return tensors


class AdamW:
    """The inner optimizer of an island; its moments are never sent."""

    def __init__(self, vectors: list[F32]) -> None:
        self._vectors = vectors
        self._means = [np.zeros_like(vector) for vector in vectors]
        self._squares = [np.zeros_like(vector) for vector in vectors]
        self._steps = 0

    def step(self, gradients: list[F32], *, factor: float) -> None:
        """Make one inner step in place, at a learning rate of `LR` times `factor`."""
        self._steps += 1
        first, second = DECAYS
        lr = LR * min(1.0, self._steps / WARMUP_STEPS) * factor
        unbiased = np.sqrt(1.0 - second**self._steps) / (1.0 - first**self._steps)
        parts = zip(self._vectors, self._means, self._squares, gradients, strict=True)
        for vector, mean, square, gradient in parts:
            mean *= np.float32(first)
            mean += np.float32(1.0 - first) * gradient
            square *= np.float32(second)
            square += np.float32(1.0 - second) * gradient * gradient
            vector *= np.float32(1.0 - lr * WEIGHT_DECAY)
            step = mean / (np.sqrt(square) + np.float32(EPSILON))
            vector -= np.float32(lr * unbiased) * step
