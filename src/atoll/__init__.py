"""Atoll trains one model on many islands of compute that barely talk to each other."""

from typing import TYPE_CHECKING

from atoll import errors
from atoll.errors import RunEnded

if TYPE_CHECKING:
    from atoll import checkpoint, data, exchange
    from atoll.exchange.bucket.create import init
    from atoll.settings import RunSettings

__all__ = [
    "RunEnded",
    "RunSettings",
    "__version__",
    "checkpoint",
    "data",
    "errors",
    "exchange",
    "init",
]

__version__ = "0.1.0"

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # `import atoll` and `atoll --help` load none of these: they import the
        # settings, and most of them numpy and the digests.
        if name == "RunSettings":
            from atoll.settings import RunSettings

            return RunSettings
        if name == "exchange":
            import atoll.exchange

            return atoll.exchange
        if name == "checkpoint":
            import atoll.checkpoint

            return atoll.checkpoint
        if name == "data":
            import atoll.data

            return atoll.data
        if name == "init":
            from atoll.exchange.bucket.create import init

            return init
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
