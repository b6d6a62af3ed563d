"""What an island registered to be given to others, and when it may be read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from atoll.errors import CorruptError, UsageError

Load = Callable[[Any], None]
Save = Callable[[], Any]


class Registered:
    """Loading and saving functions by key, behind a gate.

    The thread that trains closes the gate while an inner step changes the weights;
    who reads from another thread waits for it.
    """

    def __init__(self) -> None:
        self._functions: dict[str, tuple[Load, Save]] = {}
        self._gate = threading.Event()
        self._gate.set()

    def register(self, key: str, load: Load, save: Save) -> None:
        """Remember how to load and save one part of the state."""
        if key in self._functions:
            raise UsageError(
                f"A state is registered as {key!r} already. Choose another key."
            )
        self._functions[key] = (load, save)

    def allow(self) -> None:
        self._gate.set()

    def disallow(self) -> None:
        self._gate.clear()

    def read(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return every registered state, as soon as it may be read."""
        if not self._gate.wait(timeout_s):
            raise UsageError(
                f"The registered state could not be read for {timeout_s:g} s: an inner "
                "step was under way. Call allow_state_dict_read() after each."
            )
        return {key: save() for key, (_, save) in self._functions.items()}

    def load(self, states: dict[str, Any]) -> None:
        """Give every registered part its state.

        Raises:
            CorruptError: another set of keys came, and nothing has been loaded.
        """
        if states.keys() != self._functions.keys():
            raise CorruptError(
                f"The island that gives its state has registered {sorted(states)}, and "
                f"this one {sorted(self._functions)}. Register the same on both."
            )
        for key, (load, _) in self._functions.items():
            load(states[key])
