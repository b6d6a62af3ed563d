"""The kernels in plain numpy: the fallback, and the text that compiled ones equal.

Encoders and decoders return the index of the first element they refuse, or -1; what
they wrote is then garbage. Scratch is bounded: nothing is as long as the vector.
"""

from atoll.kernels.with_numpy.e3m0 import e3m0_decode, e3m0_encode
from atoll.kernels.with_numpy.floats import (
    bf16_decode,
    bf16_encode,
    bf16_stochastic,
    fp32_decode,
    fp32_encode,
    round_bf16,
    sum_squares,
)
from atoll.kernels.with_numpy.hashed import nesterov_hashed
from atoll.kernels.with_numpy.int8 import int8_decode, int8_encode
from atoll.kernels.with_numpy.outer import (
    accumulate,
    accumulate_divided,
    accumulate_scaled,
    adam,
    divide,
    heavy_ball,
    nesterov,
    scale,
    sgd,
)
from atoll.kernels.with_numpy.sealing import difference, difference_fed, left_over
from atoll.kernels.with_numpy.squares import bf16_squares, e3m0_squares, fp32_squares
from atoll.kernels.with_numpy.topk import topk_decode, topk_encode

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
    "nesterov_hashed",
    "round_bf16",
    "scale",
    "sgd",
    "sum_squares",
    "topk_decode",
    "topk_encode",
]
