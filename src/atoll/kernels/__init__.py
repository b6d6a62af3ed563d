"""Owns the loops over flat buffers: codecs, sums and outer steps, block by block.

Does not know what a buffer means, nor whose it is.
Start reading at `with_numpy`, which is the plain text; `with_numba` holds the same
functions compiled, and gives the same bytes. `active` says which of them serves.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from atoll.errors import UsageError
from atoll.kernels.blocks import Work, over_blocks, usable_threads
from atoll.kernels.warming import warm_kernels

__all__ = ["Work", "active", "over_blocks", "usable_threads", "use", "warm"]

_KINDS = ("numba", "numpy")
_serving: list[ModuleType] = []


def active() -> ModuleType:
    """Return the module of kernels that serves: compiled ones where numba imports."""
    if not _serving:
        try:
            use("numba")
        except UsageError:
            use("numpy")
    return _serving[0]


def use(kind: str) -> None:
    """Let the kernels of one kind, "numpy" or "numba", serve this process.

    Raises:
        UsageError: there is no such kind, or numba cannot be imported.
    """
    if kind not in _KINDS:
        raise UsageError(f"kernels of kind {kind!r} do not exist. Use one of {_KINDS}.")
    try:
        module = importlib.import_module(f"atoll.kernels.with_{kind}")
    except ImportError as exc:
        raise UsageError(
            f"kernels of kind {kind!r} cannot be loaded: {exc}. "
            'Install them with: pip install "atoll[fast]"'
        ) from exc
    _serving[:] = [module]


def warm(*, up: str, down: str, optimizer: str) -> None:
    """Load what a run needs whose settings are these, so that no update waits for it.

    Takes seconds where nothing is compiled yet. Safe to repeat, and from any thread.
    """
    warm_kernels(active(), up=up, down=down, optimizer=optimizer)
