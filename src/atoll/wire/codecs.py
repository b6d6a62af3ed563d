"""Codecs: between the flat fp32 vector of a fragment and the bytes of a body.

Rule 1: the bytes are a function of the values alone (and of the seed, for stochastic
        rounding), on every machine and with every kind of kernel.
Rule 2: a vector may be encoded in parts and a body decoded in parts. A part starts at a
        multiple of the codec's block, and ends at one or where the vector ends.
Rule 3: bytes are hostile. Decoding refuses bytes that no encoder writes where they
        could do harm, and never yields a NaN or an infinity.
Rule 4: decoded values are flushed: magnitudes below 2**-100 are zero.

The layouts are in `atoll.kernels.layouts`, the loops in `atoll.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.errors import CorruptError, NonFinite, UsageError
from atoll.kernels.dispatch import BLOCK
from atoll.kernels.layouts import (
    E3M0_BLOCK,
    INT8_BLOCK,
    TOPK_BLOCK,
    e3m0_bytes,
    int8_bytes,
    topk_bytes,
)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

Encode = Callable[[ModuleType, Floats, Bytes, int, int], int]
Decode = Callable[[ModuleType, Bytes, Floats], int]


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One way to write a vector as bytes. Get one with `codec`."""

    name: str
    code: int
    """The id on the wire."""

    block: int
    """Elements that share a scale: a part of a body starts at a multiple of it."""

    body_bytes: Callable[[int], int]
    """Returns the size in bytes of a body with a number of elements."""

    _encode: Encode
    _decode: Decode

    def offset(self, first: int) -> int:
        """Return where in a body the bytes of element `first` start."""
        self._require_block(first)
        return self.body_bytes(first)

    def encode(
        self, values: Floats, body: Bytes, *, seed: int = 0, first: int = 0
    ) -> None:
        """Write `values`, which start at element `first` of the fragment, to `body`.

        `body` is exactly as long as they need. Only stochastic rounding uses `seed`.

        Raises:
            NonFinite: a value is NaN, infinite or beyond the codec's range; `index`
                counts from the start of the fragment. `body` is then garbage.
        """
        self._require_block(first)
        if body.size != self.body_bytes(values.size):
            raise UsageError(
                f"a body of {body.size} bytes cannot take {values.size} elements in "
                f"{self.name}. That needs {self.body_bytes(values.size)} bytes."
            )
        refused = self._encode(kernels.active(), values, body, seed, first)
        if refused >= 0:
            raise NonFinite(
                f"element {first + refused} is {values[refused]}, which {self.name} "
                "cannot hold.",
                index=first + refused,
            )

    def decode(self, body: Bytes, out: Floats, *, first: int = 0) -> None:
        """Fill `out` with the elements of a whole body from `first` on.

        Raises:
            CorruptError: the body is too short or too long, or holds bytes that no
                encoder writes. `out` is then garbage.
        """
        part = self._part(body, first, out.size)
        refused = self._decode(kernels.active(), part, out)
        if refused >= 0:
            raise CorruptError(
                f"element {first + refused} of a body in {self.name} is not something "
                "that an encoder writes. Ask for the bytes again."
            )

    def decode_add(
        self,
        body: Bytes,
        out: Floats,
        *,
        weight: float | None = None,
        first: int = 0,
        scratch: Floats | None = None,
    ) -> None:
        """Add the elements of a whole body from `first` on to `out`, block by block.

        out = flush(out + decoded), or flush(out + flush(weight * decoded)). `scratch`
        saves an allocation; it holds at least 4096 elements.

        Raises:
            CorruptError: as for `decode`; part of `out` may have been added to.
        """
        if scratch is None:
            scratch = np.empty(min(BLOCK, out.size), np.float32)
        step = scratch.size // TOPK_BLOCK * TOPK_BLOCK or out.size
        if step > scratch.size:
            raise UsageError(
                f"a scratch of {scratch.size} elements is too short for {out.size}. "
                f"Give at least {TOPK_BLOCK}."
            )
        active = kernels.active()
        for start in range(0, out.size, max(step, 1)):
            total = out[start : start + step]
            decoded = scratch[: total.size]
            self.decode(body, decoded, first=first + start)
            if weight is None:
                active.accumulate(total, decoded)
            else:
                active.accumulate_scaled(total, decoded, weight)

    def _part(self, body: Bytes, first: int, elements: int) -> Bytes:
        start = self.offset(first) if first else 0
        end = start + self.body_bytes(elements)
        if start == 0 and end == body.size:
            return body
        ends_at_a_block = (first + elements) % self.block == 0
        if end > body.size or (end < body.size and not ends_at_a_block):
            raise CorruptError(
                f"a body of {body.size} bytes in {self.name} does not hold elements "
                f"{first} to {first + elements}, which end at byte {end}. "
                "Ask for the bytes again."
            )
        return body[start:end]

    def _require_block(self, first: int) -> None:
        if first % self.block:
            raise UsageError(
                f"first={first} must be a multiple of {self.block}, the block of "
                f"{self.name}."
            )


def codec(name: str) -> Codec:
    """Return the codec that settings call `name`."""
    if name not in _BY_NAME:
        raise UsageError(
            f"codec {name!r} is unknown. Use one of {', '.join(_BY_NAME)}."
        )
    return _BY_NAME[name]


def codec_by_code(code: int) -> Codec:
    """Return the codec with this id on the wire.

    Raises:
        CorruptError: there is none.
    """
    if code not in _BY_CODE:
        raise CorruptError(
            f"codec id {code} is unknown, and only {sorted(_BY_CODE)} are known. "
            "The sender may run a later version."
        )
    return _BY_CODE[code]


_CODECS = (
    Codec(
        name="fp32",
        code=1,
        block=1,
        body_bytes=lambda elements: 4 * elements,
        _encode=lambda k, x, body, *_: k.fp32_encode(x, body.view(np.float32)),
        _decode=lambda k, body, out: k.fp32_decode(body.view(np.float32), out),
    ),
    Codec(
        name="bf16",
        code=2,
        block=1,
        body_bytes=lambda elements: 2 * elements,
        _encode=lambda k, x, body, *_: k.bf16_encode(x, body.view(np.uint16)),
        _decode=lambda k, body, out: k.bf16_decode(body.view(np.uint16), out),
    ),
    Codec(
        name="int8",
        code=3,
        block=INT8_BLOCK,
        body_bytes=int8_bytes,
        _encode=lambda k, x, body, *_: k.int8_encode(x, body),
        _decode=lambda k, body, out: k.int8_decode(body, out),
    ),
    Codec(
        name="e3m0",
        code=4,
        block=E3M0_BLOCK,
        body_bytes=e3m0_bytes,
        _encode=lambda k, x, body, *_: k.e3m0_encode(x, body),
        _decode=lambda k, body, out: k.e3m0_decode(body, out),
    ),
    Codec(
        name="topk-2bit",
        code=5,
        block=TOPK_BLOCK,
        body_bytes=topk_bytes,
        _encode=lambda k, x, body, *_: k.topk_encode(x, body),
        _decode=lambda k, body, out: k.topk_decode(body, out),
    ),
    Codec(
        name="bf16-stochastic",
        code=6,
        block=1,
        body_bytes=lambda elements: 2 * elements,
        _encode=lambda k, x, body, seed, first: k.bf16_stochastic(
            x, body.view(np.uint16), seed, first
        ),
        _decode=lambda k, body, out: k.bf16_decode(body.view(np.uint16), out),
    ),
)
_BY_NAME = {codec_.name: codec_ for codec_ in _CODECS}
_BY_CODE = {codec_.code: codec_ for codec_ in _CODECS}
