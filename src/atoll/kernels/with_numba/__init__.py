"""The kernels compiled by numba: the functions of `with_numpy`, and the same bytes.

This is the only package that imports numba. Compiled loops allocate nothing.
"""

from atoll.kernels.with_numba.e3m0 import e3m0_decode, e3m0_encode
from atoll.kernels.with_numba.floats import (
    bf16_decode,
    bf16_encode,
    bf16_stochastic,
    fp32_decode,
    fp32_encode,
    round_bf16,
    sum_squares,
)
from atoll.kernels.with_numba.hashed import nesterov_hashed
from atoll.kernels.with_numba.int8 import int8_decode, int8_encode
from atoll.kernels.with_numba.outer import (
    accumulate,
    accumulate_scaled,
    adam,
    divide,
    heavy_ball,
    nesterov,
    sgd,
)
from atoll.kernels.with_numba.topk import topk_decode, topk_encode

__all__ = [
    "accumulate",
    "accumulate_scaled",
    "adam",
    "bf16_decode",
    "bf16_encode",
    "bf16_stochastic",
    "divide",
    "e3m0_decode",
    "e3m0_encode",
    "fp32_decode",
    "fp32_encode",
    "heavy_ball",
    "int8_decode",
    "int8_encode",
    "nesterov",
    "nesterov_hashed",
    "round_bf16",
    "sgd",
    "sum_squares",
    "topk_decode",
    "topk_encode",
]
