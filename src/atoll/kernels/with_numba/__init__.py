"""The kernels compiled by numba: the functions of `with_numpy`, and the same bytes.

This is the only package that imports numba. No buffer is as long as the vector.
"""

from atoll.kernels.with_numba.codecs import (
    bf16_decode,
    bf16_encode,
    bf16_squares,
    bf16_stochastic,
    e3m0_decode,
    e3m0_encode,
    e3m0_squares,
    fp32_decode,
    fp32_encode,
    fp32_squares,
    int8_decode,
    int8_encode,
    round_bf16,
    sum_squares,
)
from atoll.kernels.with_numba.outer import (
    accumulate,
    accumulate_divided,
    accumulate_scaled,
    adam,
    difference,
    difference_fed,
    divide,
    heavy_ball,
    left_over,
    nesterov,
    scale,
    sgd,
)
from atoll.kernels.with_numba.topk import topk_decode, topk_encode

__all__ = [
    "accumulate",
    "accumulate_divided",
    "accumulate_scaled",
    "adam",
    "bf16_decode",
    "bf16_encode",
    "bf16_squares",
    "bf16_stochastic",
    "difference",
    "difference_fed",
    "divide",
    "e3m0_decode",
    "e3m0_encode",
    "e3m0_squares",
    "fp32_decode",
    "fp32_encode",
    "fp32_squares",
    "heavy_ball",
    "int8_decode",
    "int8_encode",
    "left_over",
    "nesterov",
    "round_bf16",
    "scale",
    "sgd",
    "sum_squares",
    "topk_decode",
    "topk_encode",
]
