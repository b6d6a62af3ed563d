"""What an engine answers, when it answers what nobody has thought of.

Every engine reads answers that another program has written: a number that is a word, a
field that is not there. `registry` gives out launchers with this around them, so that
each of them reads plainly, and none has to expect everything.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import Unreachable
from atoll.launch.base import GRACE_S, Keep, Launcher, Order, Plan, Traits
from atoll.launch.handle import Handle
from atoll.launch.states import Report

ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
MAX_SAID = 300


class Understanding:
    """A launcher that has one, and tells what that could not make sense of."""

    def __init__(self, engine: str, inner: Launcher) -> None:
        self._engine, self._inner = engine, inner

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    def plan(self, order: Order) -> Plan:
        return self._inner.plan(order)

    def launch(self, order: Order, *, keep: Keep) -> Handle:
        with self._asked("launch"):
            return self._inner.launch(order, keep=keep)

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        with self._asked("poll"):
            return self._inner.poll(handle)

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        with self._asked("logs"):
            return self._inner.logs(handle, index, after=after)

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        with self._asked("cancel"):
            self._inner.cancel(handle, indexes=indexes, grace_s=grace_s)

    @contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        """Let what could not be understood be an error of ours.

        Asking again may help: an answer may have been cut off, or a proxy's.
        """
        try:
            yield
        except ODD as exc:
            at = traceback.extract_tb(exc.__traceback__)[-1]
            where = f"{Path(at.filename).name}, line {at.lineno}"
            raise Unreachable(
                f"What {self._engine} answers to {what!r} is not understood: "
                f"{type(exc).__name__}: {str(exc)[:MAX_SAID]} ({where}). Is it of a "
                "version that this engine of Atoll was made for?"
            ) from exc
