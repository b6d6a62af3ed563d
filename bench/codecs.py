"""How fast is a codec, beside copying the same fp32 vector?

The peer is a warm `torch.Tensor.copy_`, on one thread like ours; a ratio of 0.5 means
that the codec takes twice as long as the copy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from _timing import Row, arguments, medians, report

from atoll.wire import codec

LIMITS = {
    "fp32": None,
    "bf16": 0.5,
    "bf16-stochastic": None,
    "int8": 0.25,
    "e3m0": 0.2,
    "topk-2bit": None,
}


def main() -> None:
    """Print the table."""
    given = arguments(__doc__ or "")
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    values = generator.standard_normal(given.elements, np.float32) * np.float32(1e-3)
    out = np.zeros_like(values)
    source, target = torch.from_numpy(values), torch.zeros(given.elements)

    rows = []
    for name, limit in LIMITS.items():
        actions = codec_actions(name, values, out)
        took = medians(
            {"copy": lambda: target.copy_(source)} | actions, turns=given.turns
        )
        rows += [
            Row(
                what=f"{name} {action}",
                ratio=took["copy"] / took[action],
                limit=limit,
                ours_s=took[action],
                peer_s=took["copy"],
            )
            for action in actions
        ]
    report(f"codecs beside copy_, {given.elements} elements, one thread", rows)


def codec_actions(
    name: str, values: np.ndarray, out: np.ndarray
) -> dict[str, Callable[[], object]]:
    """Return what is timed of one codec, on buffers that are warm."""
    kind = codec(name)
    body = np.zeros(kind.body_bytes(values.size), np.uint8)
    scratch = np.zeros(65536, np.float32)
    return {
        "encode": lambda: kind.encode(values, body, seed=1),
        "decode": lambda: kind.decode(body, out),
        "decode_add": lambda: kind.decode_add(body, out, scratch=scratch),
    }


if __name__ == "__main__":
    main()
