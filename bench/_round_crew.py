"""Processes that do something together when they are told to, for `round.py`.

A member reads words on its standard input, does what each word means, and says in one
line of JSON what came of it, with the CPU time that its process has used since it last
spoke. So that all begin at once, all are told before any is listened to. Times of
different members can be compared: one machine, one clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

END_S = 30.0
"""How long a member may take to end by itself."""

REST = "rest"
"""Means nothing: the member only says how much CPU time it has used."""

SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RUST_LOG": "error",
}
Said = dict[str, Any]


class Member:
    """One process, as its starter sees it."""

    def __init__(self, script: str, *arguments: object) -> None:
        path = Path(__file__).with_name(script)
        self.name = f"{script} {' '.join(map(str, arguments))}"
        self._process = subprocess.Popen(
            [sys.executable, str(path), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # One thread each as ours have, no way but the loopback, and no chatter.
            env={**os.environ, **SURROUNDINGS},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout

    def tell(self, word: str) -> None:
        """Have the member do something."""
        self._in.write(f"{word}\n")
        self._in.flush()

    def hear(self) -> Said:
        """Return what came of it.

        Raises:
            RuntimeError: the member has ended.
        """
        line = self._out.readline()
        if not line:
            code = self._process.wait(END_S)
            raise RuntimeError(f"{self.name} ended with status {code}: see above.")
        said: Said = json.loads(line)
        return said

    def end(self) -> None:
        """Let the member end, and see to it that it does."""
        self._in.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()


class Crew:
    """Starts members, and ends them with the `with` block, the last one first."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def start(self, script: str, *arguments: object) -> Member:
        member = Member(script, *arguments)
        self._stack.callback(member.end)
        return member


def together(members: Sequence[Member], word: str) -> tuple[float, list[Said]]:
    """Return how long it takes until all have done something, and what they say."""
    start_s = time.monotonic()
    for member in members:
        member.tell(word)
    said = [member.hear() for member in members]
    return time.monotonic() - start_s, said


def cpu_seconds(said: Sequence[Said]) -> float:
    """Return the CPU time of all members together."""
    return sum(float(each["cpu_s"]) for each in said)


def attend(acts: Mapping[str, Callable[[], Said | None]], **first: object) -> None:
    """Be a member: say `first`, then do what is told until nobody tells any more."""
    out, sys.stdout = sys.stdout, sys.stderr  # what others print is no answer
    print(json.dumps(first), file=out, flush=True)
    before_s = time.process_time()
    for line in sys.stdin:
        word = line.strip()
        said = (acts[word]() if word != REST else None) or {}
        now_s = time.process_time()
        said["cpu_s"], before_s = now_s - before_s, now_s
        print(json.dumps(said), file=out, flush=True)
