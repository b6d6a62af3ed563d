"""An update is judged from its bytes as it would be from its elements."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.errors import CorruptError, Refused
from atoll.settings import RunSettings
from atoll.testing import vector_model
from atoll.weights import UpdateCheck, lay_out, terms_of
from atoll.weights.verify import BodyNorm, Norm
from atoll.wire import FrameKind, Header, codec, piece_count, piece_range, with_body
from tests.kernels.vectors import KINDS, serving

CODECS = ("fp32", "bf16", "bf16-stochastic", "int8", "e3m0", "topk-2bit")
PIECE, BLOCK = 2**18, 2**16
ELEMENTS = PIECE + BLOCK + 4099

kinds = pytest.mark.parametrize("kind", KINDS)


def encoded(name: str) -> np.ndarray:
    values = np.random.default_rng(1).standard_normal(ELEMENTS, np.float32)
    body = np.empty(codec(name).body_bytes(ELEMENTS), np.uint8)
    codec(name).encode(values, body, seed=7)
    return body


def norm_of_elements(name: str, body: np.ndarray) -> float:
    values, norm = np.empty(ELEMENTS, np.float32), Norm()
    codec(name).decode(body, values)
    norm.add(values)
    return norm.value()


def check_of(name: str, body: np.ndarray, norm: float) -> UpdateCheck:
    outer = {"optimizer": "sgd", "lr": 1.0}
    settings = RunSettings.from_dict({"wire": {"up": name}, "outer": outer})
    (layout,) = lay_out(vector_model({"w": (ELEMENTS,)}), settings)
    header = Header(
        kind=FrameKind.UPDATE,
        run="run",
        fragment=0,
        round=1,
        island="a",
        incarnation=1,
        codec=name,
        elements=ELEMENTS,
        norm=norm,
    )
    return UpdateCheck(with_body(header, body), layout, terms_of(layout, settings))


def judge(name: str, body: np.ndarray, norm: float) -> None:
    """Have an update judged piece by piece."""
    check = check_of(name, body, norm)
    for index in range(piece_count(ELEMENTS)):
        start, end = piece_range(codec(name), ELEMENTS, index)
        check.piece(index, body.data[start:end])
    check.finish()


@kinds
@pytest.mark.parametrize("name", CODECS)
def test_a_norm_from_bytes_has_the_bits_of_one_from_elements(
    name: str, kind: str
) -> None:
    """However a body is cut into parts, for every codec and both kinds of kernel."""
    body = encoded(name)
    with serving(kind):
        norm = BodyNorm(codec(name))
        cut = codec(name).offset(PIECE)
        assert norm.add(body[:cut], PIECE) is None
        assert norm.add(body[cut:], ELEMENTS - PIECE) is None
        assert norm.value() == norm_of_elements(name, body)


@kinds
@pytest.mark.parametrize("name", CODECS)
def test_an_update_with_its_own_norm_passes(name: str, kind: str) -> None:
    """Whole pieces and the short last one decode to the norm that the header says."""
    body = encoded(name)
    with serving(kind):
        judge(name, body, norm_of_elements(name, body))


@kinds
@pytest.mark.parametrize("name", CODECS)
def test_an_update_with_another_norm_is_refused(name: str, kind: str) -> None:
    """A norm that is off by a thousandth is a lie."""
    body = encoded(name)
    with serving(kind), pytest.raises(Refused, match="says that its norm is"):
        judge(name, body, 1.001 * norm_of_elements(name, body))


@kinds
@pytest.mark.parametrize("at", [5, BLOCK, PIECE - 1, PIECE + BLOCK + 7])
@pytest.mark.parametrize(("name", "bad"), [("fp32", "f4"), ("bf16", "u2")])
def test_what_is_not_finite_is_refused_by_its_block(
    name: str, bad: str, at: int, kind: str
) -> None:
    """The refusal names the 65536 elements, or fewer at the end, that hold it."""
    body = encoded(name)
    body.view(bad)[at] = np.inf if bad == "f4" else 0x7FC0
    first = at // BLOCK * BLOCK
    last = min(first + BLOCK, ELEMENTS)
    with (
        serving(kind),
        pytest.raises(Refused, match=f"between element {first} and {last}. Find"),
    ):
        judge(name, body, 1.0)


@kinds
@pytest.mark.parametrize("name", CODECS)
def test_a_part_of_another_size_is_no_norm(name: str, kind: str) -> None:
    """Bytes that are too few for their elements are refused, not read beyond."""
    body = encoded(name)
    with serving(kind):
        assert BodyNorm(codec(name)).add(body[:-1].copy(), ELEMENTS) is not None


def test_a_piece_that_was_changed_is_corrupt_before_it_is_decoded() -> None:
    """The digest is looked at first: other bytes are asked for again, not refused."""
    body = encoded("fp32")
    check = check_of("fp32", body, 1.0)
    body.view(np.float32)[3] = np.nan
    with pytest.raises(CorruptError, match="does not match its digest"):
        check.piece(0, body.data[: 4 * PIECE])
