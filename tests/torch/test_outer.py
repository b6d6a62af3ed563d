"""Whole runs against the algorithm's text, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch

import atoll.torch
from atoll.algorithm import merge, outer
from atoll.algorithm.adopt import pseudo_gradient
from atoll.errors import UsageError
from atoll.settings import RunSettings
from atoll.wire import codec
from tests.algorithm.vectors import F32
from tests.torch.runs import (
    Quadratic,
    Table,
    bits,
    run_of,
    sgd,
    state_of,
    together,
    train,
)

pytestmark = pytest.mark.torch

ROUNDS, EVERY = 3, 2
INNER_LR = 0.1
CENTRES = {"a": 0.3, "b": -0.7, "c": 2.1}
TOKENS = {"a": 3, "b": 1, "c": 7}
START = np.random.default_rng(0).normal(size=150).astype(np.float32)

Moments = tuple[F32, ...]
Step = Callable[[F32, Moments, int], tuple[F32, Moments]]


def text_of(settings: RunSettings) -> Step:
    """Return the outer step of the text: change and moments from mean and moments."""
    lr, momentum = settings.outer.lr, settings.outer.momentum

    def sgd_step(mean: F32, moments: Moments, count: int) -> tuple[F32, Moments]:
        return outer.sgd(mean, lr=lr), ()

    def momentum_step(mean: F32, moments: Moments, count: int) -> tuple[F32, Moments]:
        step = {"nesterov": outer.nesterov, "heavy_ball": outer.heavy_ball}
        change, velocity = step[settings.outer.optimizer](
            mean, moments[0], lr=lr, momentum=momentum
        )
        return change, (velocity,)

    def adam_step(mean: F32, moments: Moments, count: int) -> tuple[F32, Moments]:
        first, second = moments
        return outer.adam(
            mean,
            (first, second),
            lr=lr,
            momentum=momentum,
            count=count,
            sqrt=np.sqrt,
        )

    return {"sgd": sgd_step, "adam": adam_step}.get(
        settings.outer.optimizer, momentum_step
    )


def merged(settings: RunSettings, values: Sequence[F32], weights: list[int]) -> F32:
    if settings.outer.merge == "trimmed":
        return merge.trimmed(values)
    if settings.outer.merge == "radial":
        return merge.radial(values, weights)
    return merge.weighted(values, weights)


def through(name: str, values: F32) -> F32:
    """Return what the other side of the wire sees."""
    kind, out = codec(name), np.empty_like(values)
    body = np.zeros(kind.body_bytes(values.size), np.uint8)
    kind.encode(values, body)
    kind.decode(body, out)
    return out


def trained(anchor: F32, centre: float) -> F32:
    """Return what a plain loop of one window makes of the anchor."""
    model = Quadratic(*anchor.tolist())
    train(model, sgd(model, lr=INNER_LR), steps=EVERY, slope=centre)
    return model.w.detach().numpy()


def predict(settings: RunSettings, islands: str) -> tuple[F32, Moments]:
    """Return anchor and moments after all rounds, by the text alone."""
    step = text_of(settings)
    anchor = START
    moments: Moments = (np.zeros_like(START), np.zeros_like(START))
    by_tokens = settings.outer.weight == "tokens"
    weights = [TOKENS[name] * EVERY if by_tokens else 1 for name in islands]
    for count in range(1, ROUNDS + 1):
        updates = [
            through(
                settings.wire.up,
                pseudo_gradient(anchor, trained(anchor, CENTRES[name])),
            )
            for name in islands
        ]
        mean = through(settings.wire.down, merged(settings, updates, weights))
        change, moments = step(mean, moments, count)
        anchor = outer.apply(anchor, change)
    return anchor, moments


def live(run: atoll.exchange.MemoryRun, name: str) -> None:
    model = Quadratic(*START.tolist())
    optimizer = sgd(model, lr=INNER_LR)
    with atoll.torch.join(model, optimizer, run, island=name) as island:
        while True:
            island.report(tokens=TOKENS[name])
            train(model, optimizer, slope=CENTRES[name])


def follow_the_text(islands: str, **tables: Table) -> None:
    run = run_of(len(islands), every=EVERY, run={"end_rounds": ROUNDS}, **tables)

    together(*(partial(live, run, name) for name in islands))

    anchor, moments = predict(run.settings, islands)
    state = state_of(run)
    assert bits(state.anchor) == bits(anchor)
    for mine, texts in zip(state.moments, moments, strict=False):
        assert bits(mine) == bits(texts)
    assert not np.array_equal(anchor, START)


@pytest.mark.parametrize("islands", ["a", "ab", "abc"])
@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9},
        {"optimizer": "heavy_ball", "lr": 0.7, "momentum": 0.9},
        {"optimizer": "sgd", "lr": 0.7},
        {"optimizer": "adam", "lr": 0.01, "momentum": 0.9},
    ],
    ids=lambda values: str(values["optimizer"]),
)
def test_every_outer_optimizer_follows_the_text(
    values: dict[str, object], islands: str
) -> None:
    """Anchor and velocity of a real run are those of the algorithm's text."""
    follow_the_text(islands, outer=values)


@pytest.mark.parametrize(
    ("merge", "weight"),
    [
        ("mean", "uniform"),
        ("mean", "tokens"),
        ("radial", "uniform"),
        ("radial", "tokens"),
        ("trimmed", "uniform"),
    ],
)
def test_every_merge_and_weight_follows_the_text(merge: str, weight: str) -> None:
    """Three islands of different tokens; a trimmed mean knows no weights."""
    nesterov = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
    follow_the_text("abc", outer={**nesterov, "merge": merge, "weight": weight})


@pytest.mark.parametrize("down", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("up", ["fp32", "bf16", "int8"])
def test_every_wire_follows_the_text(up: str, down: str) -> None:
    """What codecs lose is lost in the same bits by everyone."""
    nesterov = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
    follow_the_text("abc", wire={"up": up, "down": down}, outer=nesterov)


@pytest.mark.parametrize(
    ("table", "values", "key"),
    [
        ("outer", {"weight": "tokens"}, r"outer\.weight='tokens'"),
        ("run", {"end_tokens": 100}, r"run\.end_tokens"),
    ],
)
def test_tokens_that_are_needed_and_not_reported_are_asked_for(
    table: str, values: Table, key: str
) -> None:
    """At its first round the island is refused by name, with the line to add."""
    run, model = run_of(1, every=1, **{table: values}), Quadratic(1.0)
    optimizer = sgd(model)
    with (
        atoll.torch.join(model, optimizer, run, island="tokyo"),
        pytest.raises(
            UsageError, match=rf"'tokyo' has reported 0 tokens.*{key}.*island\.report"
        ),
    ):
        train(model, optimizer, slope=0.0)


def test_the_run_ends_by_tokens() -> None:
    """Every island's loop ends in the round in which enough tokens have counted."""
    run = run_of(2, every=2, run={"end_tokens": 100})

    def train_on(name: str, tokens: int) -> tuple[int, int, int]:
        model = Quadratic(1.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as i:
            while True:
                i.report(tokens=tokens)
                train(model, optimizer, slope=0.0)
        return i.inner_steps, i.round, i.run_tokens

    # 2 * (5 + 20) = 50 tokens a round: two rounds, four inner steps.
    expected = (4, 2, 100)
    assert together(partial(train_on, "a", 5), partial(train_on, "b", 20)) == [
        expected,
        expected,
    ]


def test_an_update_is_weighed_by_the_tokens_it_holds() -> None:
    """Carried work brings its tokens along; a settled round starts again from zero."""
    run = run_of(2, every=2, outer={"weight": "tokens"}, run={"end_rounds": 2})

    def train_on(name: str, tokens: Sequence[int]) -> torch.Tensor:
        model = Quadratic(8.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as i:
            for count in tokens:
                i.report(tokens=count)
                # The gradient of (w - c)**2 / 2 with c = w - 1 is 1.
                train(model, optimizer, slope=model.w.item() - count)
        return model.w.detach()

    a, b = together(
        partial(train_on, "a", [1, 1, 3, 3]), partial(train_on, "b", [3] * 4)
    )

    # Round 1: 2 by 2 tokens and 6 by 6: 2/8 * 2 + 6/8 * 6 = 5. Round 2: 6 by 6 each: 6.
    assert a.tolist() == b.tolist() == [8.0 - 5.0 - 6.0]
