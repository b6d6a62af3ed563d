"""Calls a function as a command: `python -m atoll.launch.calling module:function ...`.

The arguments are given to it as text, and what it returns is the exit code: None is 0.
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
        UsageError: there is none. What the module itself raises is not touched.
    """
    module, _, name = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not module.startswith(exc.name):
            raise
        raise UsageError(
            f"There is no module {exc.name!r} for {named!r} in {os.getcwd()}, nor "
            "among those that are installed."
        ) from exc
    except AttributeError as exc:
        raise UsageError(f"The module {module!r} has no function {name!r}.") from exc
    if not callable(found):
        raise UsageError(f"{named!r} is a {type(found).__name__}, and no function.")
    return found  # type: ignore[no-any-return]


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
