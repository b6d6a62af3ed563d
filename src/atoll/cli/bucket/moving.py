"""Takes a run from its coordinator into a store, or makes sure that it stays.

Rule 1: everything here is safe to repeat. Who was interrupted says the same again.
Rule 2: the run is where the store's settings say, once they are there; only then is the
        coordinator told to send everybody on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import numpy as np

from atoll.bundle import MAX_BYTES, Bundle
from atoll.bundle.archive import MAX_CODE_BYTES
from atoll.cli.asking import Asking, surroundings_for
from atoll.errors import CorruptError, Refused, Unreachable, UsageError
from atoll.exchange.api import Incoming
from atoll.exchange.api.fields import MAX_LARGE_BYTES, load
from atoll.exchange.api.routes import PROTOCOL, PROTOCOL_HEADER, target_of
from atoll.exchange.base import PART_BYTES, Frame
from atoll.exchange.bucket import ThreadTiming, keys
from atoll.exchange.bucket.create import reliable, require_no_coordinator
from atoll.exchange.bucket.move_in import (
    MOVED_RUN,
    MovedRun,
    MoveIn,
    UnclaimedUpdate,
    give_up,
    is_here,
    require_free,
)
from atoll.http import Download, at_most
from atoll.island.connection import call_to
from atoll.protocol import TensorSpec
from atoll.protocol.model import bytes_of
from atoll.security import Role, RunUrl
from atoll.wire import blake3_digest, verify_body
from atoll.wire.digests import Bytes

PATIENCE_S, PAUSE_S = 90.0, 0.5
"""How long a coordinator may be busy with a round, or wait for its islands to speak."""

FRAME_S = 600.0
"""How long it may write a large state before it sends it."""

T = TypeVar("T")


class Departure:
    """One run at a coordinator, and the store that it goes to. Close it."""

    def __init__(self, run: RunUrl, url: str) -> None:
        require_no_coordinator(url)
        around = surroundings_for(run)
        caller, headers = call_to(run, around, role=Role.OPERATOR)
        spoken = {**headers, PROTOCOL_HEADER: str(PROTOCOL)}
        self._asking = Asking(run, caller, spoken, shown=around.certificate)
        self._url, self._timing = url, ThreadTiming()
        self._store = reliable(url, self._timing.pause)
        self.is_under_way = False
        """Whether the run was told to go, and has not arrived."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._asking.__exit__(kind, exc, traceback)
        self._timing.close()

    def go(self) -> dict[str, Any]:
        """Take the run to the store, and return the coordinator's status after it.

        Raises:
            UsageError: something is there, or the run is on its way elsewhere.
            Unreachable: the coordinator or the store does not answer; say it again.
        """
        move = self._move()
        if move is None:
            require_free(self._store, url=self._url)
            said = {"target": self._url, "nonce": secrets.token_hex(16)}
            self._again(lambda: self._asking.post("/control/move", said))
        self.is_under_way = True
        belongings = self._belongings()
        if not is_here(self._store, belongings.run):
            self._bring_bundle(belongings.settings.settings.run.bundle)
            self._bring_code()
            arriving = MoveIn(self._store, self._timing, belongings)
            arriving.bring(self._state, self._update, self)
            arriving.settle()
        status = self._say("moved")
        self.is_under_way = False
        return status

    def stay(self) -> dict[str, Any]:
        """Let the run go on at its coordinator, unless it is at the store already.

        Raises:
            UsageError: it is not on its way there.
            Refused: it is there.
        """
        move = self._move()
        if move is None:
            raise UsageError(f"The run is not on its way to {self._url}.")
        if move["is_over"] or not give_up(self._store, self._belongings().run):
            self._say("moved")
            raise Refused(f"The run is at {self._url} already, and goes on there.")
        return self._say("stay")

    def _move(self) -> dict[str, Any] | None:
        """Return the move that is under way or over; None if there is none."""
        move: dict[str, Any] | None = self._asking.get("/status").get("move")
        if move is not None and move["target"] != self._url:
            raise UsageError(
                f"The run {'has moved' if move['is_over'] else 'is on its way'} to "
                f"{move['target']}, and not to {self._url}. Name that one."
            )
        return move

    def _say(self, action: str) -> dict[str, Any]:
        said = {"target": self._url}
        status: dict[str, Any] = self._again(
            lambda: self._asking.post(f"/control/{action}", said)
        )
        return status

    def _belongings(self) -> MovedRun:
        reply = self._again(lambda: self._asking.call("GET", "/belongings"))
        said = load(bytes(reply.body), what="belongings", most=MAX_LARGE_BYTES)
        return MOVED_RUN.read(said, "belongings")

    def _bring_bundle(self, digest: str | None) -> None:
        """Put what defines the model into the store, before anything speaks of it."""
        if digest is None:
            return
        bundle = Bundle.of_archive(self._archive("/bundle", MAX_BYTES), digest=digest)
        self._store.put(keys.bundle(digest), [bundle.data])

    def _bring_code(self) -> None:
        """Put what islands were launched with where they will ask for it."""
        for digest in self._again(lambda: self._asking.get("/code"))["digests"]:
            data = self._archive(f"/code/{digest}", MAX_CODE_BYTES)
            if blake3_digest(data).hex() != digest:
                raise CorruptError(
                    f"The code {digest[:12]} that came from the coordinator has "
                    "another digest. Remove it from code/ in its directory."
                )
            self._store.put(keys.code(digest), [data])

    def _archive(self, target: str, most_bytes: int) -> bytes:
        """Return a file of the coordinator's."""
        fetching = Download(at_most(most_bytes, target))
        reply = self._again(
            lambda: self._asking.call(
                "GET", target, fetching=fetching, timeout_s=FRAME_S
            )
        )
        return bytes(reply.body)

    def _state(self, fragment: int) -> Frame:
        return self._frame(target_of("state", fragment))

    def _update(self, left: UnclaimedUpdate) -> Frame:
        return self._frame(update_target(left))

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        """Yield a constant that the coordinator keeps. Implements `Constants`."""
        target = target_of("constant", constant.digest)
        for start in range(first, bytes_of(constant), PART_BYTES):
            asked = {"Range": f"bytes={start}-{start + PART_BYTES - 1}"}
            yield self._again(
                partial(self._asking.call, "GET", target, headers=asked)
            ).body

    def _frame(self, target: str) -> Frame:
        fetching = Download(lambda size: memoryview(np.empty(size, np.uint8).data))
        reply = self._again(
            lambda: self._asking.call(
                "GET", target, fetching=fetching, timeout_s=FRAME_S
            )
        )
        incoming = Incoming.of(reply.body)
        header = incoming.header()
        frame = Frame(header, incoming.body(header))
        incoming.finish()
        verify_body(header, frame.body)
        return frame

    def _again(self, ask: Callable[[], T]) -> T:
        """Ask until a coordinator that is busy has time."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return ask()
            except Unreachable:
                if time.monotonic() > until_s:
                    raise
            time.sleep(PAUSE_S)


def update_target(left: UnclaimedUpdate) -> str:
    """Return where a coordinator has an update that comes along."""
    island = quote(left.island, safe="")
    return f"/belongings/{left.fragment}/{left.round}/{island}"
