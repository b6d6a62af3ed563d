"""Sealing and reducing block by block are the texts of `compress` and `merge`."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.algorithm import merge as merge_text
from atoll.errors import ModelError, NonFinite, UsageError
from atoll.protocol import ModelSpec, TensorSpec
from atoll.settings import RunSettings
from atoll.testing import vector_model
from atoll.weights import Contribution, FragmentLayout, adopt, lay_out, reduce, seal
from atoll.wire import codec

ELEMENTS = 65536 + 4099
CODECS = ("fp32", "bf16", "bf16-stochastic", "int8", "e3m0", "topk-2bit")


def one_tensor(elements: int = ELEMENTS, dtype: str = "float32") -> FragmentLayout:
    return FragmentLayout(vector_model({"w": (elements,)}, dtype=dtype).tensors)


def normal(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=ELEMENTS).astype(np.float32)


def sealed_body(name: str) -> np.ndarray:
    return np.empty(codec(name).body_bytes(ELEMENTS), np.uint8)


@pytest.mark.parametrize("name", CODECS)
def test_a_sealed_update_is_the_encoded_difference_plus_the_residual(name: str) -> None:
    """X = loaded - local + decay * residual; what is left of x is the new residual."""
    anchor, local, residual = normal(1), normal(2), normal(3)
    body, after = sealed_body(name), np.empty(ELEMENTS, np.float32)
    norm = seal(
        one_tensor(),
        anchor,
        local,
        body,
        up=codec(name),
        seed=9,
        residual=residual,
        residual_after=after,
        decay=0.5,
    )

    x = (anchor - local) + residual * np.float32(0.5)
    whole, sent = sealed_body(name), np.empty(ELEMENTS, np.float32)
    codec(name).encode(x, whole, seed=9)
    codec(name).decode(whole, sent)
    assert body.tobytes() == whole.tobytes()
    assert after.tobytes() == (x - sent).tobytes()
    assert norm == pytest.approx(float(np.linalg.norm(sent.astype(np.float64))))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_island_that_has_not_trained_seals_exactly_zero(dtype: str) -> None:
    """Loading casts the anchor, and the difference is to what was loaded."""
    layout, anchor = one_tensor(dtype=dtype), normal(4)
    local, body = np.empty(ELEMENTS, np.float32), sealed_body("fp32")
    layout.load(anchor, local)
    assert (local != anchor).any()

    norm = seal(layout, anchor, local, body, up=codec("fp32"))

    assert norm == 0.0
    assert not body.any()


def test_a_value_that_is_not_finite_is_refused_by_the_name_of_its_parameter() -> None:
    """The message says which parameter, wherever in the fragment it lies."""
    layout = FragmentLayout(vector_model({"a": (70000,), "b.bias": (5,)}).tensors)
    anchor, local = np.zeros((2, layout.elements), np.float32)
    local[70003] = np.inf
    body = np.empty(codec("bf16").body_bytes(layout.elements), np.uint8)

    with pytest.raises(NonFinite, match=r"'b.bias' is NaN, infinite") as caught:
        seal(layout, anchor, local, body, up=codec("bf16"))
    assert caught.value.index == 70003


@pytest.mark.parametrize("up", CODECS)
@pytest.mark.parametrize(
    "weights", [(5, 5, 5), (1, 2, 4), (1,) * 8, (3, 1, 4, 1, 5, 9, 2)], ids=str
)
@pytest.mark.parametrize("merge", ["mean", "trimmed", "radial"])
def test_reducing_bodies_is_merging_values(
    up: str, weights: tuple[int, ...], merge: str
) -> None:
    """Decoding, merging and encoding block by block gives the text's bytes."""
    contributions, values = [], []
    for seed, weight in enumerate(weights):
        body, value = sealed_body(up), np.empty(ELEMENTS, np.float32)
        codec(up).encode(normal(seed), body, seed=seed)
        codec(up).decode(body, value)
        contributions.append(Contribution(codec(up), body, weight))
        values.append(value)
    if merge == "trimmed":
        expected = merge_text.trimmed(values)
    else:
        merged = merge_text.weighted if merge == "mean" else merge_text.radial
        expected = merged(values, weights)
    body = sealed_body("fp32")
    codec("fp32").encode(expected, body)

    agreed = reduce(one_tensor(), contributions, down=codec("fp32"), merge=merge)

    assert agreed.tobytes() == body.tobytes()


def test_radial_takes_each_tensor_for_itself() -> None:
    """A tensor whose islands disagree keeps its length, whatever another one does."""
    layout = FragmentLayout(vector_model({"a": (2,), "b": (2,)}).tensors)
    # a: (3, 0) and (0, 3) are orthogonal, so the mean direction keeps length 3, at 45
    # degrees; b: equal values stay.
    values = np.array([[3, 0, 1, 1], [0, 3, 1, 1]], np.float32)
    contributions = []
    for value in values:
        body = np.empty(16, np.uint8)
        codec("fp32").encode(value, body)
        contributions.append(Contribution(codec("fp32"), body, 1))

    agreed = reduce(layout, contributions, down=codec("fp32"), merge="radial")

    expected = [3 / np.sqrt(2), 3 / np.sqrt(2), 1, 1]
    np.testing.assert_allclose(agreed.view(np.float32), expected, rtol=1e-6)


def test_adopting_block_by_block() -> None:
    """Each way to adopt follows its formula in every block."""
    layout, anchor, base = one_tensor(), normal(1), normal(2)
    start = normal(3)
    expected = {
        "rebase": anchor + (start - base),
        "mix": np.float32(0.25) * start + np.float32(0.75) * anchor,
        "carry": anchor - (base - start),
        "replace": anchor,
    }
    for how, result in expected.items():
        local = start.copy()
        adopt(layout, how, anchor, local, base, keep_local=0.25)
        assert local.tobytes() == result.tobytes(), how


def test_buffers_are_one_more_fragment() -> None:
    """Parameters are split as asked; persistent floating buffers follow together."""
    names = [("h.0.w", "parameter"), ("h.1.w", "parameter"), ("mean", "buffer")]
    model = ModelSpec(
        tuple(
            TensorSpec(name=name, shape=(2,), dtype="float32", role=role)  # type: ignore[arg-type]
            for name, role in names
        )
    )
    layout = lay_out(model, RunSettings.from_dict({"sync": {"num_fragments": 2}}))

    assert [[t.name for t in f.tensors] for f in layout] == [
        ["h.0.w"],
        ["h.1.w"],
        ["mean"],
    ]
    assert [fragment.is_buffers for fragment in layout] == [False, False, True]


def test_a_dtype_that_cannot_be_carried_is_refused_by_name() -> None:
    """float64 would lose what fp32 cannot hold."""
    with pytest.raises(ModelError, match=r"'w' has dtype float64.*freeze it"):
        lay_out(vector_model({"w": (2,)}, dtype="float64"), RunSettings())


def test_a_model_without_blocks_cannot_be_split_by_them() -> None:
    """The error names the way out."""
    settings = RunSettings.from_dict({"sync": {"num_fragments": 2}})

    with pytest.raises(UsageError, match=r"by_size"):
        lay_out(vector_model({"w": (2,), "v": (2,)}), settings)
