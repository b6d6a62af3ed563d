"""One text, three libraries, equal bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from atoll.algorithm import adopt, compress, merge, outer
from atoll.algorithm.arithmetic import TINY, divide, flush, fp32
from tests.algorithm.vectors import F32

Arrays = list[Any]


class Library(NamedTuple):
    """How to get values into and out of an array library, and its exact root."""

    load: Callable[[F32], Any]
    sqrt: Callable[[Any], Any]


def numpy_library() -> Library:
    """Return numpy, the one the others are compared with."""
    return Library(lambda x: x, np.sqrt)


def torch_library() -> Library:
    """Return torch, whose own root is not correctly rounded on a CPU."""
    torch = pytest.importorskip("torch")
    return Library(torch.from_numpy, lambda x: x.double().sqrt().float())


def jax_library() -> Library:
    """Return JAX, operation by operation."""
    jnp = pytest.importorskip("jax.numpy")
    return Library(jnp.asarray, jnp.sqrt)


LIBRARIES = {"torch": torch_library, "jax": jax_library}
others = pytest.mark.parametrize(
    "other",
    [
        pytest.param("torch", marks=pytest.mark.torch),
        pytest.param("jax", marks=pytest.mark.jax),
    ],
)

LR, MOMENTUM, SHARE = fp32(0.7), fp32(0.9), fp32(1 / 3)


def adversarial() -> F32:
    """Return signed zeros, subnormals, both sides of 2**-100, huge and plain values."""
    edges = [0.0, 1e-45, 1e-40, 2.0**-126, 2.0**-101, TINY, 2.0**-50, 1e-8, 1 / 3, 1.0]
    edges += [1.5, 3.0, 1e4, 2.0**63, 2.0**120, 3.4e38]
    nearby = [np.nextafter(np.float32(x), np.float32(y)) for x in edges for y in (0, 1)]
    positive = np.array([*edges, *nearby], np.float32)
    return np.concatenate([positive, -positive])


def operands(count: int) -> list[F32]:
    """Return vectors that pair every edge with every other, then random bits."""
    rng = np.random.default_rng(7)
    edges = adversarial()
    pairs = [np.repeat(edges, len(edges)), np.tile(edges, len(edges))]
    pairs += [rng.permutation(pairs[0]) for _ in range(count - 2)]
    noise = rng.integers(0, 2**32, (count, 40_000), np.uint32).view(np.float32)
    noise = np.where(np.isfinite(noise), noise, np.float32(1.25))
    return [np.concatenate(both) for both in zip(pairs[:count], noise, strict=True)]


def nesterov(x: Arrays, at: Library) -> Arrays:
    """Step and apply."""
    change, velocity = outer.nesterov(x[0], x[1], lr=LR, momentum=MOMENTUM)
    return [change, velocity, outer.apply(x[2], change)]


def heavy_ball(x: Arrays, at: Library) -> Arrays:
    """Step and apply."""
    change, velocity = outer.heavy_ball(x[0], x[1], lr=LR, momentum=MOMENTUM)
    return [change, velocity, outer.apply(x[2], change)]


def sgd(x: Arrays, at: Library) -> Arrays:
    """Step and apply, once by the whole mean and once by a share of it."""
    return [
        outer.apply(x[1], outer.sgd(x[0], lr=LR, share=share)) for share in (1.0, SHARE)
    ]


def adam(x: Arrays, at: Library) -> Arrays:
    """Take the seventh step; second moments are squares, so not negative."""
    moments = (x[1], abs(x[2]))
    change, moved = outer.adam(
        x[0], moments, lr=LR, momentum=MOMENTUM, count=7, sqrt=at.sqrt
    )
    return [change, *moved]


def delayed_nesterov(x: Arrays, at: Library) -> Arrays:
    """Take the three rounds that fill a buffer; the middle one is neither end."""
    velocity, results = x[1], []
    for mean, (is_first, is_last) in zip(
        (x[0], x[2], x[3]), ((True, False), (False, False), (False, True)), strict=True
    ):
        change, velocity = outer.delayed_nesterov(
            mean,
            velocity,
            lr=LR,
            momentum=MOMENTUM,
            share=SHARE,
            is_first=is_first,
            is_last=is_last,
        )
        results += [change, velocity]
    return results


def seal(x: Arrays, at: Library) -> Arrays:
    """Seal through a codec that loses two bits."""
    return list(
        compress.seal(x[0], x[1], lambda y: divide(flush(y * 3.0), 7.0), decay=LR)
    )


OPERATIONS: dict[str, Callable[[Arrays, Library], Arrays]] = {
    "flush": lambda x, at: [flush(x[0])],
    "divide": lambda x, at: [divide(flush(x[0]), 3.0)],
    "nesterov": nesterov,
    "heavy_ball": heavy_ball,
    "sgd": sgd,
    "adam": adam,
    "delayed_nesterov": delayed_nesterov,
    "mean": lambda x, at: [merge.mean(x[:3])],
    "weighted": lambda x, at: [merge.weighted(x, [3, 1, 7, 5])],
    "trimmed": lambda x, at: [merge.trimmed(x), merge.trimmed(x[:3])],
    "pseudo_gradient": lambda x, at: [adopt.pseudo_gradient(x[0], x[1])],
    "rebase": lambda x, at: [adopt.rebase(x[0], x[1], x[2])],
    "mix": lambda x, at: [adopt.mix(x[0], x[1], keep_local=fp32(0.3))],
    "carry": lambda x, at: [adopt.carry(x[0], x[1], x[2])],
    "seal": seal,
    "refused": lambda x, at: [compress.refused(x[0], x[1])],
}
operations = pytest.mark.parametrize("operation", OPERATIONS)


def run(operation: str, at: Library) -> list[F32]:
    """Return the results of an operation on the adversarial operands, as numpy."""
    with np.errstate(all="ignore"):
        loaded = [at.load(x) for x in operands(4)]
        return [np.asarray(x) for x in OPERATIONS[operation](loaded, at)]


def differing(one: F32, two: F32) -> int:
    """Count values whose bits differ; all NaNs are one."""
    a, b = (np.where(np.isnan(x), np.float32(np.nan), x) for x in (one, two))
    return int(np.count_nonzero(a.view(np.uint32) != b.view(np.uint32)))


@others
@operations
def test_libraries_give_equal_bits(operation: str, other: str) -> None:
    """Every operation of the text gives numpy's bits on torch and on JAX."""
    expected = run(operation, numpy_library())
    got = run(operation, LIBRARIES[other]())

    assert [x.dtype for x in got] == [np.dtype(np.float32)] * len(expected)
    assert [differing(a, b) for a, b in zip(expected, got, strict=True)] == [
        0 for _ in expected
    ]


@others
def test_poison_is_never_flushed(other: str) -> None:
    """NaN and infinities pass through flush and divide on every library."""
    poison = np.array([np.nan, np.inf, -np.inf], np.float32)
    at = LIBRARIES[other]()

    for got in (flush(at.load(poison)), divide(at.load(poison), 3.0)):
        assert differing(np.asarray(got), poison) == 0


@operations
def test_no_result_is_tiny(operation: str) -> None:
    """No operation returns -0.0 or anything between zero and 2**-100."""
    for result in run(operation, numpy_library()):
        magnitude = abs(result)
        assert not np.any((magnitude > 0) & (magnitude < np.float32(TINY)))
        assert not np.any((result == 0) & np.signbit(result))


@pytest.fixture
def flushing_processor() -> Iterator[None]:
    """Let the processor of this thread treat subnormal numbers as zero."""
    torch = importlib.import_module("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.torch
@operations
def test_flush_to_zero_changes_nothing(
    operation: str, request: pytest.FixtureRequest
) -> None:
    """A thread whose processor flushes subnormal numbers gets the same bits."""
    expected = run(operation, numpy_library())
    request.getfixturevalue("flushing_processor")
    got = run(operation, numpy_library())

    assert [differing(a, b) for a, b in zip(expected, got, strict=True)] == [
        0 for _ in expected
    ]


@pytest.mark.jax
@pytest.mark.parametrize(
    "operation", ["nesterov", "heavy_ball", "sgd", "delayed_nesterov"]
)
def test_compiled_steps_give_equal_bits(operation: str) -> None:
    """Compiled as one program, where a sum could swallow a product, bits are equal."""
    jax = pytest.importorskip("jax")
    at = jax_library()
    step = jax.jit(lambda x: OPERATIONS[operation](x, at))
    with np.errstate(all="ignore"):
        got = [np.asarray(x) for x in step([at.load(x) for x in operands(4)])]
    expected = run(operation, numpy_library())

    assert [differing(a, b) for a, b in zip(expected, got, strict=True)] == [
        0 for _ in expected
    ]


def exact_root(x: F32) -> F32:
    """Return the correctly rounded root: fp64 then fp32 is safe, 53 >= 2*24 + 2."""
    return np.sqrt(x.astype(np.float64)).astype(np.float32)


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(numpy_library, id="numpy"),
        pytest.param(torch_library, id="torch", marks=pytest.mark.torch),
        pytest.param(jax_library, id="jax", marks=pytest.mark.jax),
    ],
)
def test_roots_are_correctly_rounded(library: Callable[[], Library]) -> None:
    """The root that Adam is given is exact for every mantissa, at both parities."""
    # For x in [1, 4) rounding changes at odd multiples m of 2**-24. x - m*m is then a
    # nonzero multiple of 2**-48, so |sqrt(x) - m| > 2**-48 / 4 = 2**-50. An fp64 root
    # that errs by an ulp, 2**-52, therefore still rounds to the right fp32 number.
    # Elsewhere x is one of these times a power of 4; below 2**-100 nothing is asked.
    at = library()
    for first in range(0x3F800000, 0x40800000, 2**22):
        x = np.arange(first, first + 2**22, dtype=np.uint32).view(np.float32)
        assert differing(np.asarray(at.sqrt(at.load(x))), exact_root(x)) == 0
