"""What an island has said: the logs of its pods as one, which only grows.

A cluster forgets: a log goes with its pod, and its older part when the node rotates it.
Whoever follows counts lines. So what was read once by a launcher, it keeps.

Rule 1: lives are in their order, and the pods of one life are merged by the cluster's
time of each line; what is read later comes later, whatever its time.
Rule 2: where an island is several pods, every line says which.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime

from atoll.launch.engines.kubernetes.pods import Form, number_of

Stamp = tuple[float, int]
Line = tuple[Stamp, str]

FIRST: Stamp = (0.0, 0)
SECONDS = len("2026-11-17T06:00:00")


class Log:
    """The lines of one island."""

    def __init__(self, *, has_names: bool = False) -> None:
        self._has_names = has_names
        self._lines: list[str] = []
        self._last: dict[str, tuple[Stamp, int]] = {}

    def read(
        self, lives: Iterable[Sequence[Form]], said: Callable[[Form], list[str]]
    ) -> list[str]:
        """Return all lines, with those that its pods have said since.

        `said` returns the lines of a pod that there are, each behind its time.
        """
        for pods in lives:
            fresh = [self._fresh(pod, said(pod)) for pod in pods]
            merged = heapq.merge(*fresh, key=lambda line: line[0])
            self._lines += [text for _, text in merged]
        return self._lines

    def _fresh(self, pod: Form, lines: Sequence[str]) -> list[Line]:
        """Return what is not known of a pod's log yet."""
        name = str(pod["metadata"]["name"])
        last, num_known = self._last.get(name, (FIRST, 0))
        found = [each for each in _stamped(lines) if each[0] >= last]
        known = sum(stamp == last for stamp, _ in found)
        fresh = found[min(num_known, known) :]
        if found:
            last = found[-1][0]
            self._last[name] = last, sum(stamp == last for stamp, _ in found)
        prefix = f"pod {number_of(pod)}: " if self._has_names else ""
        return [(stamp, prefix + text) for stamp, text in fresh]


def _stamped(lines: Sequence[str]) -> Iterator[Line]:
    """Return lines by their time, which never goes back within a pod."""
    last = FIRST
    for line in lines:
        stamp, _, text = line.partition(" ")
        try:
            last = max(last, _stamp(stamp))
        except ValueError:
            text = line  # no pod has said it: the cluster does, in place of a log
        # A bar of progress goes back to the beginning of its line.
        yield from ((last, part) for part in text.splitlines() or [""])


def _stamp(text: str) -> Stamp:
    """Return a time of RFC 3339, by its seconds and nanoseconds."""
    seconds, rest = text[:SECONDS], text[SECONDS:]
    zone = rest.lstrip(".0123456789")
    fraction = rest[: len(rest) - len(zone)].lstrip(".")
    at = datetime.fromisoformat(seconds + zone)
    return at.timestamp(), int(fraction.ljust(9, "0"))
