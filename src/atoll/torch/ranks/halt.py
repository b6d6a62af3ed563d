"""A step that all ranks agree to stop at, though none waits for another between.

Rule 1: who is asked holds: it says how many inner steps it has made, and makes no
        further one before it knows where all stop. What says so is no thread that
        trains, so that ranks which wait for each other in their training do no harm.
Rule 2: all stop at the step after the last that any of them had made then.
"""

from __future__ import annotations

import threading

from atoll.errors import RemoteError


class Halt:
    """One rank's side of the agreement."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._steps = 0
        self._is_held = False
        self._at: int | None = None

    @property
    def steps(self) -> int:
        """Inner steps that this rank has made."""
        return self._steps

    @property
    def is_agreed(self) -> bool:
        """Whether the step is known, and has not come yet."""
        return self._is_held

    def hold(self) -> int:
        """Let no further step pass for now, and return how many have."""
        with self._changed:
            self._is_held, self._at = True, None
            return self._steps

    def meet(self, at: int) -> None:
        """Let steps pass up to the agreed one."""
        with self._changed:
            self._at = at
            self._changed.notify_all()

    def release(self) -> None:
        """Let steps pass: there is nobody any more to agree with."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def passed(self) -> bool:
        """Count an inner step, and return whether all ranks stop here."""
        with self._changed:
            self._steps += 1
            if not self._is_held:
                return False
            known = self._changed.wait_for(
                lambda: self._at is not None or not self._is_held, self._timeout_s
            )
            if not known:
                raise RemoteError(
                    "The ranks of this island do not agree on where to stop: one of "
                    f"them did not answer for {self._timeout_s:g} s."
                )
            is_here = self._is_held and self._at is not None and self._steps >= self._at
            if is_here:
                self._is_held = False
            return is_here
