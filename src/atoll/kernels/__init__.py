"""Owns the loops over flat buffers: codecs, sums and outer steps, block by block.

Does not know the meaning or the owner of a buffer.
Start reading at `with_numpy`, the reference; `with_numba` has the same functions,
compiled, with the same bytes. `active` returns the module in use.
"""

from __future__ import annotations

from atoll.kernels.dispatch import (
    Work,
    active,
    over_blocks,
    usable_threads,
    use,
    warm,
)

__all__ = ["Work", "active", "over_blocks", "usable_threads", "use", "warm"]
