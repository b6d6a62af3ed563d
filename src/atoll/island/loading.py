"""What an island loads before its first update, for who wants it loaded earlier."""

from __future__ import annotations

from atoll import kernels
from atoll.settings import RunSettings


def load_kernels(settings: RunSettings) -> None:
    """Load, or compile, the kernels of a run that has these settings.

    Takes seconds, once in a process; whoever forks afterwards has them as well.
    """
    kernels.warm(
        up=settings.wire.up,
        down=settings.wire.down,
        optimizer=settings.outer.optimizer,
    )
