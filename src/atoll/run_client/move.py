"""Moves a run between a coordinator and a store, or makes sure that it stays.

Rule 1: every step is safe to repeat, so an interrupted command can be run again.
Rule 2: a run has moved into a store once its settings object exists there; only then
        does the coordinator redirect its islands.
Rule 3: a run has left a store once a control document there says that it has moved.
        The coordinator's directory is complete and durable before that, and is served
        after it.
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
from typing import Any, Self, TypeVar

import numpy as np

from atoll import security
from atoll.bundle import MAX_BYTES, Bundle
from atoll.bundle.archive import MAX_CODE_BYTES
from atoll.coordinator.directory import CodeFiles, store_bundle
from atoll.coordinator.move import Arrival
from atoll.errors import CorruptError, Refused, UsageError
from atoll.exchange.api import Incoming
from atoll.exchange.api.bodies import MAX_LARGE_BYTES, load
from atoll.exchange.api.request_head import PROTOCOL, PROTOCOL_HEADER
from atoll.exchange.base import PART_BYTES, Frame
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.create import reliable, require_no_coordinator, require_there
from atoll.exchange.bucket.move import (
    MOVED_RUN,
    MovedRun,
    MoveIn,
    MoveOut,
    give_up,
    is_here,
    require_free,
)
from atoll.http import Download, at_most
from atoll.island.connection import call_to
from atoll.island.environment import credentials_from_environment
from atoll.protocol import TensorSpec
from atoll.protocol.coordinator_state import Move
from atoll.protocol.model import bytes_of
from atoll.retry import BUSY_COORDINATOR, retried
from atoll.routes import ROUTE
from atoll.run_client.coordinator import CoordinatorClient, credential_paths_for
from atoll.run_client.location import RUN_SUFFIX, RunNames, write_address
from atoll.runtime import SystemRuntime
from atoll.security.certificates import coordinator_certificate
from atoll.security.private_files import replace_private
from atoll.settings import RunSettings
from atoll.wire import blake3_digest, verify_body
from atoll.wire.digests import Bytes

PATIENCE_S = 90.0
"""How long a coordinator may be busy with a round, or wait for its islands."""

FRAME_S = 600.0
"""Timeout of a reply: a coordinator writes a large state before it sends any of it."""

T = TypeVar("T")


class MoveToStore:
    """Moves a run from a coordinator to a store. Close it."""

    def __init__(self, run: security.RunUrl, url: str) -> None:
        require_no_coordinator(url)
        paths = credential_paths_for(run)
        http_client, headers = call_to(run, paths, role=security.Role.OPERATOR)
        request_headers = {**headers, PROTOCOL_HEADER: str(PROTOCOL)}
        self._client = CoordinatorClient(
            run, http_client, request_headers, certificate=paths.certificate
        )
        self._url, self._runtime = url, SystemRuntime()
        self._store = reliable(url, self._runtime.sleep)
        self.is_moving = False
        """Whether the move has begun, and is not complete."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()
        self._runtime.close()

    def go(self) -> dict[str, Any]:
        """Move the run to the store, and return the coordinator's status after it.

        Raises:
            UsageError: the store has a run, or this run is moving to another target.
            Unreachable: the coordinator or the store does not answer; safe to repeat.
        """
        move = self._move()
        if move is None:
            require_free(self._store, url=self._url)
            request = {"target": self._url, "nonce": secrets.token_hex(16)}
            self._retry(lambda: self._client.post("/control/move", request))
        self.is_moving = True
        moved_run = self._belongings()
        if not is_here(self._store, moved_run.run):
            self._copy_bundle(moved_run.settings.settings.run.bundle)
            self._copy_code()
            move_in = MoveIn(self._store, self._runtime, moved_run)
            move_in.bring(self._state, self)
            move_in.settle()
        status = self._post_control("moved")
        self.is_moving = False
        return status

    def stay(self) -> dict[str, Any]:
        """Give up the move, unless it is complete: the run stays at its coordinator.

        Raises:
            UsageError: the run is not moving to this store.
            Refused: the run has moved already.
        """
        move = self._move()
        if move is None:
            raise UsageError(f"The run is not moving to {self._url}.")
        if move["is_over"] or not give_up(self._store, self._belongings().run):
            self._post_control("moved")
            raise Refused(f"The run has moved to {self._url} already.")
        return self._post_control("stay")

    def _move(self) -> dict[str, Any] | None:
        """Return the current or completed move; None without any."""
        move: dict[str, Any] | None = self._client.get("/status").get("move")
        if move is not None and move["target"] != self._url:
            raise UsageError(
                f"The run {'has moved' if move['is_over'] else 'is moving'} to "
                f"{move['target']}, and not to {self._url}. Name that one."
            )
        return move

    def _post_control(self, action: str) -> dict[str, Any]:
        request = {"target": self._url}
        status: dict[str, Any] = self._retry(
            lambda: self._client.post(f"/control/{action}", request)
        )
        return status

    def _belongings(self) -> MovedRun:
        reply = self._retry(lambda: self._client.call("GET", "/belongings"))
        document = load(bytes(reply.body), name="belongings", max_bytes=MAX_LARGE_BYTES)
        return MOVED_RUN.read(document, "belongings")

    def _copy_bundle(self, digest: str | None) -> None:
        """Copy the bundle into the store, before any object refers to it."""
        if digest is None:
            return
        bundle = Bundle.of_archive(self._archive("/bundle", MAX_BYTES), digest=digest)
        self._store.put(keys.bundle(digest), [bundle.data])

    def _copy_code(self) -> None:
        """Copy the code that islands were launched with to its key in the store."""
        for digest in self._retry(lambda: self._client.get("/code"))["digests"]:
            data = self._archive(f"/code/{digest}", MAX_CODE_BYTES)
            if blake3_digest(data).hex() != digest:
                raise CorruptError(
                    f"The code {digest[:12]} received from the coordinator has "
                    "another digest. Remove it from code/ in its directory."
                )
            self._store.put(keys.code(digest), [data])

    def _archive(self, target: str, max_bytes: int) -> bytes:
        """Return a file of the coordinator."""
        download = Download(at_most(max_bytes, target))
        reply = self._retry(
            lambda: self._client.call(
                "GET", target, download=download, timeout_s=FRAME_S
            )
        )
        return bytes(reply.body)

    def _state(self, fragment: int) -> Frame:
        return self._frame(ROUTE["state"].target(fragment))

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        """Yield a constant that the coordinator has. Implements `Constants`."""
        target = ROUTE["constant"].target(constant.digest)
        for start in range(first, bytes_of(constant), PART_BYTES):
            headers = {"Range": f"bytes={start}-{start + PART_BYTES - 1}"}
            yield self._retry(
                partial(self._client.call, "GET", target, headers=headers)
            ).body

    def _frame(self, target: str) -> Frame:
        download = Download(lambda size: memoryview(np.empty(size, np.uint8).data))
        reply = self._retry(
            lambda: self._client.call(
                "GET", target, download=download, timeout_s=FRAME_S
            )
        )
        incoming = Incoming.of(reply.body)
        header = incoming.header()
        frame = Frame(header, incoming.body(header))
        incoming.finish()
        verify_body(header, frame.body)
        return frame

    def _retry(self, call: Callable[[], T]) -> T:
        """Repeat a call while the coordinator is busy or unreachable."""
        until_s = self._runtime.now_s() + PATIENCE_S
        return retried(
            call,
            BUSY_COORDINATOR,
            sleep=self._runtime.sleep,
            may_retry=lambda fault, pause_s: self._runtime.now_s() <= until_s,
        )


CONNECT_S = 2.0
"""Timeout of the check that the run's new address is free."""

RUN_FILE = "run.toml"
"""File in the directory: the run file for `atoll serve`."""


@dataclass(frozen=True, kw_only=True)
class ServeInstructions:
    """A run that has left its store, and the commands that serve it."""

    run: str
    name: str
    directory: Path
    target: security.RunUrl

    @property
    def serve(self) -> str:
        """The command that serves the run."""
        host, port = self.target.address.host, self.target.address.port
        directory = shlex.quote(str(self.directory))
        listen = host if security.is_loopback(host) else "0.0.0.0"
        command = (
            f"atoll serve {shlex.quote(str(self.directory / RUN_FILE))} "
            f"--dir {directory} --listen {listen} --port {port}"
        )
        return command if self.target.has_tls else f"{command} --no-tls"

    @property
    def invite(self) -> str:
        """The command that gives other users a credential, once the run is served."""
        return f"atoll invite {shlex.quote(self.name)} --address {self.target.address}"

    def facts(self) -> dict[str, Any]:
        """Return the facts for `--json`."""
        return {
            "run": self.run,
            "name": self.name,
            "state": "moved",
            "move": {"target": str(self.target), "is_over": True},
            "directory": str(self.directory),
            "serve": self.serve,
            "invite": self.invite if self.target.has_tls else None,
        }


class MoveToCoordinator:
    """Moves a run from a store to the directory of a coordinator. Close it.

    Raises:
        UsageError: the store has no run, or one that cannot move; or the directory
            has another run.
    """

    def __init__(
        self, source: str, target: security.RunUrl, directory: Path | None
    ) -> None:
        require_there(source)
        self._source, self._target = source, target
        self.is_moving = False
        """Whether the move has begun, and is not complete."""

        self._runtime = SystemRuntime()
        try:
            store = reliable(source, self._runtime.sleep)
            self._out = MoveOut.open(store, self._runtime, url=source)
            name = self._out.settings.run.name
            directory_path = (directory or Path(f"{name}{RUN_SUFFIX}")).absolute()
            self._arrival = Arrival(directory_path, source=source, target=str(target))
        except BaseException:
            self._runtime.close()
            raise
        self._instructions = ServeInstructions(
            run=self._out.run, name=name, directory=directory_path, target=target
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._arrival.close()
        self._runtime.close()

    def go(self) -> ServeInstructions:
        """Move the run to the directory, and return how to serve it.

        Raises:
            UsageError: the run is moving to another target, or this move was given up.
            Unreachable: the store does not answer; safe to repeat.
        """
        if not self._arrival.has_come:
            self._require_own_move(self._out.look())
            _require_free_port(self._target)
            self._arrival.prepare()
            _prepare(self._instructions, self._out.settings)
            if bundle := self._out.bundle():
                store_bundle(self._instructions.directory, bundle)
            nonce = self._arrival.ticket.nonce
            move = self._out.begin(str(self._target), nonce)
            self._require_own_move(move)
            self.is_moving = True
            if not move.is_over:
                self._copy_run()
            self._arrival.settle()
            self.is_moving = False
        return self._remember()

    def stay(self) -> None:
        """Give up the move, unless it is complete: the run stays in its store.

        Raises:
            UsageError: the run is not moving to this coordinator.
            Refused: the run has moved already.
        """
        move = self._out.look()
        if move is None:
            self._discard_arrival()
            raise UsageError(f"The run is not moving to {self._target}.")
        self._require_target(move)
        if self._out.stay():
            self._discard_arrival()
            return
        if move.nonce == self._arrival.ticket.nonce:
            self._arrival.settle()
            self._remember()
        raise Refused(
            f"The run has moved to {self._target} already. Serve it on the machine of "
            f"its directory: {self._instructions.serve}"
        )

    def _copy_run(self) -> None:
        code = CodeFiles(self._instructions.directory)
        for digest, data in self._out.codes():
            code.store(digest, data, is_unlimited=True)
        self._arrival.receive(self._out)
        if not self._out.settle():
            self._arrival.forget()
            self.is_moving = False
            raise UsageError(
                "Another user has given this move up meanwhile: the run stays at "
                f"{self._source}. Repeat the command to move it after all."
            )

    def _discard_arrival(self) -> None:
        if self._arrival.is_begun and not self._arrival.has_come:
            self._arrival.forget()

    def _require_own_move(self, move: Move | None) -> None:
        """Raise if the run moves to another target, or another command moves it."""
        if move is None:
            return
        self._require_target(move)
        if move.nonce != self._arrival.ticket.nonce:
            raise UsageError(
                f"The run {_movement(move)} to {move.target} by another directory than "
                f"{self._instructions.directory}. Repeat the command where it was begun"
                f"{'' if move.is_over else ', or give that move up with --back'}."
            )

    def _require_target(self, move: Move) -> None:
        if move.target != str(self._target):
            raise UsageError(
                f"The run {_movement(move)} to {move.target}, and not to "
                f"{self._target}. Name that one."
            )

    def _remember(self) -> ServeInstructions:
        """Point the names that this user has for the run to its new location."""
        names = RunNames(credentials_from_environment())
        for name in (self._instructions.run, self._instructions.name):
            names.remember(name, str(self._target))
        return self._instructions


def _movement(move: Move) -> str:
    return "has moved" if move.is_over else "is moving"


def _require_free_port(target: security.RunUrl) -> None:
    """Raise if something listens at the address where the run is to be served.

    Raises:
        UsageError: it does; its credentials in this directory would be replaced.
    """
    address = target.address
    try:
        socket.create_connection((address.host, address.port), CONNECT_S).close()
    except OSError:
        return
    raise UsageError(
        f"Something listens at {target} already, and the run is to be served there "
        "after this. Stop it, or choose another port."
    )


def _prepare(instructions: ServeInstructions, settings: RunSettings) -> None:
    """Make the credentials, run file and address that `atoll serve` would make.

    Islands of this user find them as soon as they are redirected.
    """
    directory, target = instructions.directory, instructions.target
    security.run_tokens(directory)
    pin = None
    if target.has_tls:
        hosts = [target.address.host]
        pin = coordinator_certificate(directory, hosts=hosts, unix_s=time.time()).pin
    replace_private(directory / RUN_FILE, run_file_text(settings).encode())
    write_address(directory, str(target), is_open=False)
    tokens = {role: security.token_file(directory, role) for role in security.Role}
    credentials = security.Credentials(credentials_from_environment().credentials)
    credentials.remember(str(target), pin=pin, tokens=tokens)


def run_file_text(settings: RunSettings) -> str:
    """Return settings as the text of a run file."""
    lines = []
    for table, values in settings.to_dict().items():
        lines.append(f"[{table}]")
        for key, value in values.items():
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
        lines.append("")
    return "\n".join(lines)
