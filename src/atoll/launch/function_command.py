"""Calls a function as a command.

    python -m atoll.launch.function_command module:function ...

It passes the arguments as text, and exits with the returned value: None is 0.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from atoll.errors import UsageError


def function_of(named: str) -> Callable[..., object]:
    """Return the function that `module:function` names.

    Raises:
        UsageError: there is none. Exceptions of the module itself pass unchanged.
    """
    module, _, name = named.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not module.startswith(exc.name):
            raise
        raise UsageError(
            f"There is no module {exc.name!r} for {named!r} in {os.getcwd()}, nor "
            "among those that are installed."
        ) from exc
    except AttributeError as exc:
        raise UsageError(f"The module {module!r} has no function {name!r}.") from exc
    if not callable(function):
        raise UsageError(f"{named!r} is a {type(function).__name__}, and no function.")
    return function  # type: ignore[no-any-return]


def main(arguments: Sequence[str]) -> None:
    """Call the function that the first argument names with all others."""
    sys.path.insert(0, os.getcwd())
    try:
        function = function_of(arguments[0])
    except UsageError as exc:
        sys.exit(f"atoll: {exc}")
    sys.exit(function(*arguments[1:]))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
