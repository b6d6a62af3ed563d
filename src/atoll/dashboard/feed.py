"""The feed of a run: one poll of the run for any number of open pages.

Rule 1: one thread asks the run. Its answers are versions; a page asks for the changes
        since the version that it has, and waits without a thread until there are some.
Rule 2: only the last versions are stored. A page that has an older one, or one of
        another process, gets everything.
Rule 3: while no page asks, the run is polled every 30 s.
Rule 4: an error of the run is part of the feed: the pages keep the last values, and
        say since when there is no answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from atoll.errors import AtollError, Refused, UsageError
from atoll.http import DeferredResponse, Response
from atoll.run_client import Command, ControlReply, RunClient
from atoll.settings import RunSettings
from atoll.settings.reference import references, values_of
from atoll.telemetry import Event, EventPage

VERSIONS: Final = 32
IDLE_POLL_S: Final = 30.0
IDLE_AFTER_S: Final = 60.0
WAIT_S: Final = 15.0
"""After this wait a page gets an answer without news, and asks again."""

MAX_WAITING: Final = 64
MAX_EVENTS: Final = 200
COLUMNS: Final = "loss"

ROUTINE_EVENTS: Final = frozenset({"loss_reported", "update_staged", "rows_claimed"})
"""Not in the live feed: they are many. Pages of older events have them."""

T = TypeVar("T")


@dataclass(frozen=True)
class Version:
    """The answers of the run to one poll."""

    number: int
    status: Mapping[str, Any]
    history: Mapping[str, Any] | None
    """The news since the version before; None: the poll failed."""

    events: list[dict[str, Any]]
    has_all_events: bool
    """Whether earlier events are void: those of a store are computed again at times."""

    settings: Mapping[str, Any]
    error: Mapping[str, Any] | None
    """Why the last poll failed, and since when polls fail; None: it did not."""


@dataclass
class _Answers:
    """The last answers of the run."""

    status: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    epoch: object = None
    cursor: str = ""
    last_event: Event | None = None
    has_all_events: bool = False
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class _WaitingPage:
    """A request that waits for changes."""

    deferred: DeferredResponse
    make: Callable[[], Response]

    def answer(self) -> None:
        """Answer it, unless the page is gone."""
        if not self.deferred.is_gone:
            self.deferred.set(self.make())


class RunFeed:
    """Polls a run, and answers pages. Close it.

    Args:
        open_client: Opens a client of the run; called again after an error.
        poll_s: Pause between polls while a page is open; None: the client's own.
    """

    def __init__(
        self, open_client: Callable[[], RunClient], *, poll_s: float | None = None
    ) -> None:
        self._open_client = open_client
        self._client: RunClient | None = None
        self._given_poll_s = poll_s
        self._client_lock = threading.Lock()
        self._changed = threading.Condition()
        self._answers = _Answers()
        self._versions: deque[Version] = deque(maxlen=VERSIONS)
        self._waiting: deque[_WaitingPage] = deque()
        self._wanted_s = float("-inf")
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._run, name="atoll-dashboard", daemon=True
        )

    def start(self) -> None:
        """Poll now, so that a wrong address is an error of this call; then repeatedly.

        Raises:
            AtollError: the run does not answer.
        """
        with self._client_lock:
            self._poll()
        error = self._answers.error
        if error is not None and not self._answers.status:
            raise error["exception"]
        self._thread.start()

    def close(self) -> None:
        """Stop polling, and answer the pages that wait. Safe to repeat."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(5.0)
        with self._client_lock:
            self._drop_client()
        self._answer_waiting()

    @property
    def status(self) -> Mapping[str, Any]:
        """The last status."""
        return self._answers.status

    def first(self) -> dict[str, Any]:
        """Return everything that a new page shows."""
        with self._client_lock:
            self._want()
            self._answers.cursor = ""
            self._poll()
            version = self._versions[-1]
            # Best effort: without them the list of events begins with the next one.
            events: list[dict[str, Any]] = []
            with suppress(AtollError):
                page = self._opened().older_events(limit=MAX_EVENTS)
                events = [event.as_dict() for event in page.events]
        self._answer_waiting()
        return {
            **_document(version),
            "is_whole": True,
            "status": version.status,
            "history": [] if version.history is None else [version.history],
            "settings": version.settings,
            "events": events,
        }

    def after(
        self, number: int, *, respond: Callable[[dict[str, Any]], Response]
    ) -> Response | DeferredResponse:
        """Return the changes since a version; the answer waits until there are any.

        Args:
            number: The version that the page has.
            respond: Makes the response of a document.
        """

        def answer() -> Response:
            return respond(self._since(number))

        with self._changed:
            self._want()
            if self._versions[-1].number != number or self._is_closed:
                return answer()
            deferred = DeferredResponse(wait_s=WAIT_S, default=answer)
            self._waiting.append(_WaitingPage(deferred, answer))
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popleft().answer()
            return deferred

    def older_events(self, before: str, *, limit: int) -> EventPage:
        """Return a page of events of the run."""
        return self._with_client(
            lambda client: client.older_events(before, limit=limit)
        )

    def check(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return values as the run would take them over.

        Raises:
            SettingsError: one of them is wrong, or contradicts another.
        """
        settings = self._with_client(lambda client: client.settings())
        changed = {
            row.key: row.value for row in values_of(settings.with_values(values))
        }
        return {key: changed[key] for key in values}

    def control(self, command: Command, *, if_epoch: int | None = None) -> ControlReply:
        """Perform a command, unless another epoch than `if_epoch` is in force.

        Raises:
            Refused: it is, or the run refuses the command.
        """

        def perform(client: RunClient) -> ControlReply:
            if if_epoch is not None:
                epoch = client.status().document.get("epoch")
                if epoch != if_epoch:
                    raise Refused(
                        f"Epoch {epoch} is in force, and you have seen epoch "
                        f"{if_epoch}: another operator has changed settings. Look "
                        "at them, and set again."
                    )
            return client.control(command)

        reply = self._with_client(perform)
        with self._changed:
            self._want()
            self._changed.notify_all()
        return reply

    def _with_client(self, call: Callable[[RunClient], T]) -> T:
        with self._client_lock:
            return call(self._opened())

    def _opened(self) -> RunClient:
        if self._client is None:
            self._client = self._open_client()
        return self._client

    def _drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _want(self) -> None:
        """Note that a page is open."""
        was_idle = time.monotonic() - self._wanted_s > IDLE_AFTER_S
        self._wanted_s = time.monotonic()
        if was_idle:
            with self._changed:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._is_closed:
                    self._changed.wait(self._pause_s())
                if self._is_closed:
                    return
            with self._client_lock:
                self._poll()
            self._answer_waiting()

    def _pause_s(self) -> float:
        if time.monotonic() - self._wanted_s > IDLE_AFTER_S:
            return IDLE_POLL_S
        if self._given_poll_s is not None:
            return self._given_poll_s
        return 2.0 if self._client is None else self._client.poll_s

    def _poll(self) -> None:
        """Ask the run, and add a version. For the holder of the client's lock."""
        answers, history, events = self._answers, None, []
        try:
            client = self._opened()
            answers.status = client.status().document
            history = self._history(client)
            events = self._events(client)
            if not answers.settings or answers.epoch != answers.status.get("epoch"):
                answers.epoch = answers.status.get("epoch")
                answers.settings = settings_document(client.settings())
            answers.error = None
        except Exception as exc:  # a run may answer anything; the thread must live
            self._drop_client()
            since_unix_s = (answers.error or {}).get("since_unix_s", time.time())
            answers.error = {"exception": exc, "since_unix_s": since_unix_s}
        self._add(history, events)

    def _history(self, client: RunClient) -> Mapping[str, Any]:
        history = client.history(columns=COLUMNS, after=self._answers.cursor)
        self._answers.cursor = history["cursor"]
        return history

    def _events(self, client: RunClient) -> list[dict[str, Any]]:
        """Return the events since the last poll."""
        answers, last = self._answers, self._answers.last_event
        try:
            new_events = client.events(after=None if answers.has_all_events else last)
        except UsageError:  # those of a store cannot be continued
            answers.has_all_events = True
            new_events = client.events()
        if not new_events or new_events[-1] == last:
            return []
        answers.last_event = new_events[-1]
        if not self._versions:  # a new page takes them from the pages of events
            return []
        listed = [event for event in new_events if event.name not in ROUTINE_EVENTS]
        return [event.as_dict() for event in listed[-MAX_EVENTS:]]

    def _add(
        self, history: Mapping[str, Any] | None, events: list[dict[str, Any]]
    ) -> None:
        answers = self._answers
        error = None
        if answers.error is not None:
            since_unix_s = answers.error["since_unix_s"]
            message = str(answers.error["exception"])
            error = {"message": message, "since_unix_s": since_unix_s}
        with self._changed:
            number = self._versions[-1].number + 1 if self._versions else 1
            version = Version(
                number,
                answers.status,
                history,
                events,
                answers.has_all_events and bool(events),
                answers.settings,
                error,
            )
            self._versions.append(version)

    def _answer_waiting(self) -> None:
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
        for page in waiting:
            page.answer()

    def _since(self, number: int) -> dict[str, Any]:
        """Return the changes since a version; everything, if it is not stored."""
        with self._changed:
            versions = list(self._versions)
        newest = versions[-1]
        base = next((row for row in versions if row.number == number), None)
        if base is None:
            return {**_document(newest), "is_lost": True}
        later = [row for row in versions if row.number > number]
        complete = [row for row in later if row.has_all_events]
        answer = {
            **_document(newest),
            **changed_status(base.status, newest.status),
            "history": [row.history for row in later if row.history is not None],
            "events": [
                event for row in (complete[-1:] or later) for event in row.events
            ],
            "has_all_events": bool(complete),
        }
        if newest.settings is not base.settings:
            answer["settings"] = newest.settings
        return answer


def _document(version: Version) -> dict[str, Any]:
    return {
        "version": version.number,
        "now_unix_s": round(time.time(), 3),
        "error": version.error,
    }


def changed_status(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a status that differ, and those of islands by name."""
    status = {
        key: value
        for key, value in after.items()
        if key != "islands" and (key not in before or before[key] != value)
    }
    rows_before = {row["island"]: row for row in before.get("islands", ())}
    rows_after = {row["island"]: row for row in after.get("islands", ())}
    islands = {}
    for name, row in rows_after.items():
        old = rows_before.get(name, {})
        changes = {
            key: row[key] for key in row if key not in old or old[key] != row[key]
        }
        if changes:
            islands[name] = changes
    missing = sorted(rows_before.keys() - rows_after.keys())
    return {"status": status, "islands": islands, "removed": missing}


def settings_document(settings: RunSettings) -> dict[str, Any]:
    """Return every setting with its default, its meaning, and when it changes."""
    by_key = {row.key: row for row in references()}
    return {
        "fingerprint": settings.fingerprint,
        "rows": [
            {
                "key": row.key,
                "value": row.value,
                "default": row.default,
                "is_default": row.is_default,
                "changes": row.changes,
                "values": by_key[row.key].values,
                "meaning": by_key[row.key].meaning,
            }
            for row in values_of(settings)
        ],
    }
