"""Atoll trains one model on many islands of compute that barely talk to each other."""

import importlib
from typing import TYPE_CHECKING

from atoll import errors
from atoll.errors import RunEnded

if TYPE_CHECKING:
    from atoll import checkpoint, data, exchange
    from atoll.exchange.bucket.create import init
    from atoll.settings import RunSettings

    def settings_of(run: str) -> RunSettings:
        """Return the settings in force in a run: its URL, its directory or its name."""


__all__ = [
    "RunEnded",
    "RunSettings",
    "__version__",
    "checkpoint",
    "data",
    "errors",
    "exchange",
    "init",
    "settings_of",
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
        if name == "settings_of":
            # By name: what reaches any run is above this package.
            return importlib.import_module("atoll.run_client").settings_of
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
