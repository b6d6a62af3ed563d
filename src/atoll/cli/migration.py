"""Takes a run from its coordinator into a store, or makes sure that it stays.

Rule 1: everything here is safe to repeat. Who was interrupted says the same again.
Rule 2: the run is where the store's settings say, once they are there; only then is the
        coordinator told to send everybody on.

Takes a run from a store to a coordinator's directory, or makes sure that it stays.

Rule 1: everything here is safe to repeat. Who was interrupted says the same again.
Rule 2: the run is in the store until a word says there that it has moved. What the
        coordinator needs is durable in its directory before that, and is served after.
"""

from __future__ import annotations

import json
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import numpy as np

from atoll.bundle import MAX_BYTES, Bundle
from atoll.bundle.archive import MAX_CODE_BYTES
from atoll.cli.coordinator_client import Asking, surroundings_for
from atoll.cli.run_names import RUN_SUFFIX, Names, note_served
from atoll.coordinator.directory import CodeFiles, store_bundle
from atoll.coordinator.move import Arrival
from atoll.errors import CorruptError, Refused, Unreachable, UsageError
from atoll.exchange.api import Incoming
from atoll.exchange.api.fields import MAX_LARGE_BYTES, load
from atoll.exchange.api.routes import PROTOCOL, PROTOCOL_HEADER, target_of
from atoll.exchange.base import PART_BYTES, Frame
from atoll.exchange.bucket import ThreadTiming, keys
from atoll.exchange.bucket.create import reliable, require_no_coordinator, require_there
from atoll.exchange.bucket.move import (
    MOVED_RUN,
    MovedRun,
    MoveIn,
    MoveOut,
    UnclaimedUpdate,
    give_up,
    is_here,
    require_free,
)
from atoll.http import Download, at_most
from atoll.island.connection import call_to
from atoll.island.environment import surroundings_from_environment
from atoll.protocol import TensorSpec
from atoll.protocol.coordinator_state import Move
from atoll.protocol.model import bytes_of
from atoll.security import (
    Credentials,
    Role,
    RunUrl,
    is_loopback,
    run_tokens,
    token_file,
)
from atoll.security.certificates import coordinator_certificate
from atoll.security.private_files import replace_private
from atoll.settings import RunSettings
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
        said = load(bytes(reply.body), name="belongings", max_bytes=MAX_LARGE_BYTES)
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


LOOK_S = 2.0
"""How long is looked whether somebody listens where the run is to be served."""

RUN_FILE = "run.toml"
"""In the directory: what `atoll serve` asks for."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run that has left its store is to be served."""

    run: str
    name: str
    directory: Path
    target: RunUrl

    @property
    def serve(self) -> str:
        """The command that serves it there."""
        host, port = self.target.address.host, self.target.address.port
        directory = shlex.quote(str(self.directory))
        listen = host if is_loopback(host) else "0.0.0.0"
        said = (
            f"atoll serve {shlex.quote(str(self.directory / RUN_FILE))} "
            f"--dir {directory} --listen {listen} --port {port}"
        )
        return said if self.target.has_tls else f"{said} --no-tls"

    @property
    def invite(self) -> str:
        """The command by which others get a credential, once it is served."""
        return f"atoll invite {shlex.quote(self.name)} --address {self.target.address}"

    def facts(self) -> dict[str, Any]:
        """Return all that a tool may want to know."""
        return {
            "run": self.run,
            "name": self.name,
            "state": "moved",
            "move": {"target": str(self.target), "is_over": True},
            "directory": str(self.directory),
            "serve": self.serve,
            "invite": self.invite if self.target.has_tls else None,
        }


class Removal:
    """One run in a store, and the coordinator's directory that it goes to. Close it.

    Raises:
        UsageError: there is no run, or one that cannot move; or another run is in the
            directory.
    """

    def __init__(self, source: str, target: RunUrl, directory: Path | None) -> None:
        require_there(source)
        self._source, self._target = source, target
        self.is_under_way = False
        """Whether the run was told to go, and has not arrived."""

        self._timing = ThreadTiming()
        try:
            store = reliable(source, self._timing.pause)
            self._out = MoveOut.open(store, self._timing, url=source)
            name = self._out.settings.run.name
            place = (directory or Path(f"{name}{RUN_SUFFIX}")).absolute()
            self._arrival = Arrival(place, source=source, target=str(target))
        except BaseException:
            self._timing.close()
            raise
        self._place = Place(
            run=self._out.run, name=name, directory=place, target=target
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._arrival.close()
        self._timing.close()

    def go(self) -> Place:
        """Take the run to the directory, and return how it is served.

        Raises:
            UsageError: it is on its way elsewhere, or somebody has given this up.
            Unreachable: the store does not answer; say it again.
        """
        if not self._arrival.has_come:
            self._require_ours(self._out.look())
            _require_nobody(self._target)
            self._arrival.prepare()
            _prepare(self._place, self._out.settings)
            if bundle := self._out.bundle():
                store_bundle(self._place.directory, bundle)
            nonce = self._arrival.ticket.nonce
            move = self._out.begin(str(self._target), nonce)
            self._require_ours(move)
            self.is_under_way = True
            if not move.is_over:
                self._bring()
            self._arrival.settle()
            self.is_under_way = False
        return self._remembered()

    def stay(self) -> None:
        """Let the run go on in its store, unless it has left.

        Raises:
            UsageError: it is not on its way to this coordinator.
            Refused: it has left.
        """
        move = self._out.look()
        if move is None:
            self._forget()
            raise UsageError(f"The run is not on its way to {self._target}.")
        self._require_target(move)
        if self._out.stay():
            self._forget()
            return
        if move.nonce == self._arrival.ticket.nonce:
            self._arrival.settle()
            self._remembered()
        raise Refused(
            f"The run is at {self._target} already, and goes on there. Where its "
            f"directory is: {self._place.serve}"
        )

    def _bring(self) -> None:
        code = CodeFiles(self._place.directory)
        for digest, data in self._out.codes():
            code.store(digest, data, is_unlimited=True)
        self._arrival.receive(self._out)
        if not self._out.settle():
            self._arrival.forget()
            self.is_under_way = False
            raise UsageError(
                "Somebody has given this move up meanwhile: the run stays at "
                f"{self._source}. Say it again to move it after all."
            )

    def _forget(self) -> None:
        if self._arrival.is_begun and not self._arrival.has_come:
            self._arrival.forget()

    def _require_ours(self, move: Move | None) -> None:
        """Return unless the run goes elsewhere, or by somebody else's hand."""
        if move is None:
            return
        self._require_target(move)
        if move.nonce != self._arrival.ticket.nonce:
            raise UsageError(
                f"The run {_goes(move)} to {move.target} by another directory than "
                f"{self._place.directory}. Say the command again where it was begun"
                f"{'' if move.is_over else ', or give that move up with --back'}."
            )

    def _require_target(self, move: Move) -> None:
        if move.target != str(self._target):
            raise UsageError(
                f"The run {_goes(move)} to {move.target}, and not to {self._target}. "
                "Name that one."
            )

    def _remembered(self) -> Place:
        """Let the names that are known here mean the run where it is."""
        names = Names(surroundings_from_environment())
        for name in (self._place.run, self._place.name):
            names.remember(name, str(self._target))
        return self._place


def _goes(move: Move) -> str:
    return "has moved" if move.is_over else "is on its way"


def _require_nobody(target: RunUrl) -> None:
    """Return unless something listens where the run is to be served.

    Raises:
        UsageError: it does; what is known of it here would be forgotten.
    """
    address = target.address
    try:
        socket.create_connection((address.host, address.port), LOOK_S).close()
    except OSError:
        return
    raise UsageError(
        f"Something listens at {target} already, and the run is to be served there "
        "after this. Stop it, or choose another port."
    )


def _prepare(place: Place, settings: RunSettings) -> None:
    """Have what is served beside the run, as `atoll serve` makes it.

    Islands of this user find all that they need as soon as they are sent on.
    """
    directory, target = place.directory, place.target
    run_tokens(directory)
    pin = None
    if target.has_tls:
        hosts = [target.address.host]
        pin = coordinator_certificate(directory, hosts=hosts, unix_s=time.time()).pin
    replace_private(directory / RUN_FILE, run_file_text(settings).encode())
    note_served(directory, str(target), is_open=False)
    tokens = {role: token_file(directory, role) for role in Role}
    known = Credentials(surroundings_from_environment().credentials)
    known.remember(str(target), pin=pin, tokens=tokens)


def run_file_text(settings: RunSettings) -> str:
    """Return settings as the text of a run file."""
    lines = []
    for table, values in settings.to_dict().items():
        lines.append(f"[{table}]")
        for key, value in values.items():
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
        lines.append("")
    return "\n".join(lines)
