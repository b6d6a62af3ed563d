"""Kills and stops the processes of a run at random moments, and restarts them.

Rule 1: a strike is one SIGKILL or SIGSTOP, or several at once. What heals it is put
        on a schedule, so that the next strike may come before that.
Rule 2: between a few strikes a round must be committed. A run that stands still for
        STALL_S although every process is up is a violation, as is a process that ends
        by itself.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

from tests.kill_storm.scene import Life, Scene

GAP_S = 2.5
"""The longest pause between two strikes; the mean is half of it."""

STALL_S = 90.0
"""No run stands still for so long: longer than a lease and a restart together."""

STRIKES_PER_ROUND = 5
"""So many strikes may pass without a round; then the storm waits for one."""

KINDS = {
    "island killed": 30,
    "island stopped": 14,
    "island stopped, then killed": 8,
    "island stopped and replaced": 8,
    "island stopped beyond its lease": 1,
    "island left": 6,
    "server killed": 16,
    "server stopped": 8,
    "server stopped, then killed": 4,
    "server and island killed": 8,
    "everything killed": 2,
}
"""What may happen, and how often in relation to the rest."""

NO_KILL = "island left"
"""Ends in good order: it is not counted as a kill."""


class Violation(Exception):
    """Something happened that must not; the text says what."""


class Storm:
    """One storm over a scene. `blow` returns when the run has ended well.

    `victims` is "server" or "island", if the others are left alone.
    """

    def __init__(
        self,
        scene: Scene,
        rng: random.Random,
        *,
        kills: int,
        lease_s: float,
        tell: Callable[[str], None],
        victims: str = "",
    ) -> None:
        self._scene, self._rng, self._kills = scene, rng, kills
        self._lease_s, self._tell = lease_s, tell
        self._names = list(scene.paces_s)
        self._current: dict[str, Life] = {}
        self._watched: set[int] = set()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._is_server_up = scene.server is not None
        self._is_ending = False
        self.kinds: Counter[str] = Counter()
        self.strikes = 0
        self._strikes_at_round: dict[int, int] = {}
        self._kinds = {
            kind: weight
            for kind, weight in KINDS.items()
            if (scene.server is not None or "server" not in kind)
            and (not victims or kind.startswith(f"{victims} killed"))
        }

    def blow(self) -> None:
        """Strike as often as was asked for, then end the run.

        Raises:
            Violation: a process ended by itself, or the run stood still.
        """
        for name in self._names:
            self._start(name)
        if self._rng.random() < 0.7:  # else strikes may hit the founding
            self._until("the first rounds", lambda: self.round >= 2)
        while self.strikes < self._kills:
            self._rest(self._rng.uniform(0.0, GAP_S))
            self._until_round()
            if self._strike():
                self._progress()
        self._end()

    @property
    def round(self) -> int:
        """The furthest round that an island has taken of every fragment."""
        return max((life.round for life in self._scene.lives), default=0)

    def _progress(self) -> None:
        if self.strikes % 25 == 0 and self.strikes < self._kills:
            self._tell(f"  {self.strikes} kills, round {self.round}")

    def _until_round(self) -> None:
        before = self.round  # read once: the islands' processes write it
        since = self._strikes_at_round.setdefault(before, self.strikes)
        if self.strikes - since >= STRIKES_PER_ROUND:
            self._until("a round", lambda: self.round > before)

    def _end(self) -> None:
        while self._due:
            self._rest(0.05)
        before = self.round
        self._until(
            "every island to take part again",
            lambda: (
                self.round >= before + 2
                and not self._due
                and all(
                    life.has_joined and not life.fate for life in self._current.values()
                )
            ),
        )
        self._is_ending = True
        self._scene.stop_run()
        self._until("every process to end", lambda: not self._watched)

    def _strike(self) -> bool:
        """Draw what happens; False: nothing, or nobody was killed by it."""
        kind = self._rng.choices([*self._kinds], [*self._kinds.values()])[0]
        victims = [life for life in self._current.values() if self._is_up(life)]
        if "island" in kind and not victims:
            return False
        if kind.startswith("server") and not self._is_server_up:
            return False
        if kind == "everything killed" and len(victims) < len(self._names):
            return False
        victim = self._rng.choice(victims) if victims else None
        if not self._perform(kind, victim):
            return False
        self.kinds[kind] += 1
        self.strikes += kind != NO_KILL
        return kind != NO_KILL

    def _perform(self, kind: str, victim: Life | None) -> bool:
        """Do what a kind says; False: it does not fit this victim now."""
        match kind, victim:
            case "server killed", _:
                self._kill_server()
            case "server stopped", _:
                self._stop_server(then=self._continue_server)
            case "server stopped, then killed", _:
                self._stop_server(then=self._kill_server)
            case "everything killed", _:
                for life in self._current.values():
                    self._kill(life)
                if self._is_server_up:
                    self._kill_server()
            case _, Life():
                return self._strike_island(kind, victim)
        return True

    def _strike_island(self, kind: str, victim: Life) -> bool:
        uniform = self._rng.uniform
        if kind == "island killed":
            self._kill(victim)
        elif kind == "server and island killed":
            self._kill(victim)
            self._kill_server()
        elif kind == "island stopped":
            self._stop(victim, uniform(0.05, 3.0), self._continue)
        elif kind == "island stopped, then killed":
            self._stop(victim, uniform(0.05, 2.0), self._kill)
        elif kind == "island stopped beyond its lease":
            self._stop(victim, self._lease_s + uniform(1.0, 3.0), self._continue)
        elif not victim.has_joined:
            return False  # who joins last is the island: both might
        elif kind == "island left":
            victim.terminate()
        else:
            self._replace(victim)
        return True

    def _is_up(self, life: Life) -> bool:
        return not (life.is_stopped or life.fate) and life.process.poll() is None

    def _kill(self, life: Life) -> None:
        if life.process.poll() is None:
            life.kill()
        self._come_back(life)

    def _come_back(self, life: Life) -> None:
        """Start the island's next process, at once or soon."""
        pause_s = self._rng.choice([0.0, 0.0, self._rng.uniform(0.0, 1.5)])
        self._after(pause_s, lambda: self._start(life.name))

    def _stop(self, life: Life, seconds: float, then: Callable[[Life], None]) -> None:
        life.stop()
        self._after(seconds, lambda: then(life))

    def _continue(self, life: Life) -> None:
        if life.process.poll() is None:
            life.go_on()

    def _replace(self, life: Life) -> None:
        """Let another process take the place of a stopped one, which then goes on."""
        life.stop()
        life.fate = "replaced"
        self._start(life.name)
        self._after(self._rng.uniform(0.0, 4.0), lambda: self._continue(life))

    def _kill_server(self) -> None:
        server = self._scene.server
        if server is None or server.process is None:
            return
        self._is_server_up = False
        server.process.kill()
        server.process.wait()
        self._after(self._rng.uniform(0.0, 1.0), self._start_server)

    def _start_server(self) -> None:
        if self._scene.server is not None:
            self._scene.server.start()
            self._is_server_up = True

    def _stop_server(self, then: Callable[[], None]) -> None:
        server = self._scene.server
        if server is None or server.process is None:
            return
        self._is_server_up = False
        server.process.send_signal(signal.SIGSTOP)
        self._after(self._rng.uniform(0.05, 2.0), then)

    def _continue_server(self) -> None:
        server = self._scene.server
        if server is not None and server.process is not None:
            server.process.send_signal(signal.SIGCONT)
            self._is_server_up = True

    def _start(self, name: str) -> None:
        life = self._scene.start(name)
        self._current[name] = life
        self._watched.add(life.number)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        due_s = time.monotonic() + seconds
        heapq.heappush(self._due, (due_s, next(self._numbers), act))

    def _rest(self, seconds: float) -> None:
        for _ in self._passing(seconds):
            pass

    def _until(self, what: str, is_true: Callable[[], bool]) -> None:
        for _ in self._passing(STALL_S):
            if is_true():
                return
        states = ", ".join(map(self._state_of, self._current.values()))
        raise Violation(
            f"not within {STALL_S:g} s: {what} (round {self.round}; {states})"
        )

    def _passing(self, seconds: float) -> Iterator[None]:
        """Let time pass, do what is due, and look after the processes."""
        until_s = time.monotonic() + seconds
        while True:
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            self._look()
            yield
            if time.monotonic() >= until_s:
                return
            time.sleep(0.01)

    def _look(self) -> None:
        """Take note of processes that have ended."""
        for number in sorted(self._watched):
            life = self._scene.lives[number]
            if (code := life.process.poll()) is None:
                continue
            self._watched.discard(number)
            if life.fate == "leaving" and code in (0, -signal.SIGTERM):
                self._come_back(life)
            elif life.fate in ("", "leaving") and not (self._is_ending and code == 0):
                log = life.log.read_text()[-3000:]
                raise Violation(f"{self._state_of(life)} ended by itself:\n{log}")
        server = self._scene.server
        if self._is_server_up and server is not None and server.process is not None:
            code = server.process.poll()
            if code is not None:
                raise Violation(f"the server ended by itself with {code}")

    def _state_of(self, life: Life) -> str:
        code = life.process.poll()
        state = "stopped" if life.is_stopped else life.fate or "up"
        if code is not None:
            state = f"ended with {code}"
        joined = "" if life.has_joined else ", not joined"
        return f"process {life.number} of {life.name!r}: {state}{joined}"
