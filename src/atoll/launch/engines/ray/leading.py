"""The actor that leads one island: Ray finds it a place, and another if that is lost.

Rule 1: the island is a process of its own; Ray's has threads, and is no place to train.
Rule 2: whatever is known here is told to the ledger, for this place may go at any time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.launch.base import GRACE_S, LISTEN_THERE
from atoll.launch.engines.local.life import Life, Words
from atoll.launch.engines.local.supervisor import Group, Start
from atoll.launch.spec import Restarts

LOOK_S = 0.2
TELL_S = 5.0
"""How often the ledger hears of an island of which there is nothing new."""


@dataclass(frozen=True)
class Lead:
    """What an actor is to do: plain values, which Ray carries."""

    index: int
    name: str
    words: Sequence[str]
    environment: Mapping[str, str]
    """Secrets too: Ray has no way of its own for them."""

    restarts: Mapping[str, Any]
    is_python: bool

    def at(self, address: str) -> Lead:
        """Return the same for the place that has this address."""
        words = [address if each == LISTEN_THERE else each for each in self.words]
        return replace(self, words=words)


class Leader:
    """Leads an island; `lead` returns when it is over."""

    def __init__(self, lead: Lead, ledger: Any) -> None:
        self._lead, self._ledger = lead, ledger
        self._grace_s: float | None = None

    def go(self, grace_s: float) -> None:
        """Let the island go. Called while `lead` runs."""
        self._grace_s = grace_s

    def lead(self, ask: Any, *, is_again: bool = False) -> None:
        """Lead the island; `ask` waits for an answer of the ledger's.

        Args:
            is_again: an actor before this one was lost.
        """
        lead = self._lead
        life_number, is_to_go = ask(self._ledger.begun.remote(lead.index, is_again))
        if is_to_go:
            ask(self._ledger.ended.remote(lead.index))
            return
        log = Path(tempfile.mkdtemp(prefix="atoll-island-")) / "log"
        led = _life(lead, log)
        telling = _Telling(log)
        while True:
            now_s = time.monotonic()
            if self._grace_s is not None:
                led.cancel(now_s, grace_s=self._grace_s)
            led.look(now_s)
            said = {**vars(led.report), "state": led.report.state.value}
            said["place"] = os.uname().nodename
            if (new := telling.new(said, now_s, is_last=led.is_over)) is not None:
                told = self._ledger.hear.remote(lead.index, life_number, said, new)
                if ask(told) and self._grace_s is None and not led.is_over:
                    # The ledger may be asked a moment before this actor is, or while
                    # it was elsewhere: the island leaves cleanly all the same.
                    self._grace_s = GRACE_S
            if led.is_over:
                return
            time.sleep(LOOK_S)


class _Telling:
    """What the ledger does not know yet."""

    def __init__(self, log: Path) -> None:
        self._log, self._at = log, 0
        self._told: dict[str, Any] | None = None
        self._told_at_s = 0.0

    def new(
        self, said: dict[str, Any], now_s: float, *, is_last: bool
    ) -> list[str] | None:
        """Return the new lines if there is something to tell, else None."""
        lines = self._lines(is_last=is_last)
        if not lines and said == self._told and now_s - self._told_at_s < TELL_S:
            return None
        self._told, self._told_at_s = said, now_s
        return lines

    def _lines(self, *, is_last: bool) -> list[str]:
        """Return whole lines that came since; at the end also one without its end."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._at)
            data = file.read() if is_last else file.read(2**20)
        end = len(data) if is_last else data.rfind(b"\n") + 1
        self._at += end
        return data[:end].decode(errors="replace").splitlines()


def _life(lead: Lead, log: Path) -> Life:
    def say(text: str) -> None:
        with log.open("a") as file:
            file.write(f"atoll: {text}\n")

    start = Start(
        lead.index, lead.name, lead.words, lead.environment, None, lead.is_python
    )
    words = Words(say=say, start=lambda: Group(start, log))
    return Life(lead.index, lead.name, Restarts(**lead.restarts), words)
