"""What local weights become once the outcome is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm.adopt import carry, mix, pseudo_gradient, rebase
from atoll.algorithm.arithmetic import flush, fp32
from tests.algorithm.vectors import array, eighths, equal

finite = st.floats(-(2.0**100), 2.0**100, width=32)


@given(finite)
def test_an_island_that_did_not_train_contributes_zero(x: float) -> None:
    """What was loaded minus what is there is +0.0 when nothing changed."""
    assert equal(pseudo_gradient(array(x), array(x)), array(0))


def test_the_pseudo_gradient_is_anchor_minus_local() -> None:
    """Weights that went down from 4 to 3 give +1, so that descending repeats it."""
    assert pseudo_gradient(array(4), array(3)).item() == 1.0


@given(finite, finite)
def test_without_steps_in_flight_rebase_is_the_anchor(
    anchor: float, local: float
) -> None:
    """With no overlap an island loads the anchor, to the bit."""
    assert equal(
        rebase(array(anchor), array(local), array(local)), flush(array(anchor))
    )


def test_rebase_keeps_what_was_learnt_in_flight() -> None:
    """Local went from 5 to 4 while the anchor went to 10: local is 9."""
    assert rebase(array(10), array(4), array(5)).item() == 9.0


@given(finite, finite)
def test_the_ends_of_mix_are_exact(anchor: float, local: float) -> None:
    """keep_local = 0 is the anchor and 1 the local weights, to the bit."""
    a, b = array(anchor), array(local)

    assert equal(mix(a, b, keep_local=0.0), flush(a))
    assert equal(mix(a, b, keep_local=1.0), flush(b))


def test_mix_blends() -> None:
    """A quarter of local 8 and three quarters of anchor 4 are 5."""
    assert mix(array(4), array(8), keep_local=0.25).item() == 5.0


@given(st.floats(2.0**-40, 2.0**40, width=32), st.floats(0.01, 0.99))
def test_mix_of_equal_weights_is_them_to_an_ulp_or_two(x: float, keep: float) -> None:
    """The two shares are each rounded to fp32, and so are two products and a sum."""
    got = mix(array(x), array(x), keep_local=fp32(keep)).item()

    assert abs(got - x) <= 4 * 2.0**-24 * x


@given(eighths, eighths, eighths)
def test_carried_work_is_in_the_next_pseudo_gradient_once(
    old: float, new: float, local: float
) -> None:
    """After a missed round the pseudo-gradient is what it was before it."""
    # new - (new - (old - local)) = old - local, exact on a grid of eighths.
    moved = carry(array(new), array(old), array(local))

    assert equal(
        pseudo_gradient(array(new), moved), pseudo_gradient(array(old), array(local))
    )


@given(eighths, eighths, eighths, eighths)
def test_carrying_twice_is_carrying_once_over_both(
    old: float, between: float, new: float, local: float
) -> None:
    """Two missed rounds end where one jump over both would."""
    twice = carry(
        array(new), array(between), carry(array(between), array(old), array(local))
    )

    assert equal(twice, carry(array(new), array(old), array(local)))


@given(eighths, eighths, eighths)
def test_two_ways_to_anchor_a_stale_update_differ_by_the_anchors(
    base: float, now: float, local: float
) -> None:
    """Measured from the present anchor, stale work re-opposes all since its base."""
    # (now - local) - (base - local) = now - base
    at_now = pseudo_gradient(array(now), array(local))
    at_base = pseudo_gradient(array(base), array(local))

    assert equal(flush(at_now - at_base), flush(array(now) - array(base)))
