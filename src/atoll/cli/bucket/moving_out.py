"""Takes a run from a store to a coordinator's directory, or makes sure that it stays.

Rule 1: everything here is safe to repeat. Who was interrupted says the same again.
Rule 2: the run is in the store until a word says there that it has moved. What the
        coordinator needs is durable in its directory before that, and is served after.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from atoll.cli.names import RUN_SUFFIX, Names, note_served
from atoll.coordinator.directory import CodeFiles, store_bundle
from atoll.coordinator.move import Arrival
from atoll.errors import Refused, UsageError
from atoll.exchange.bucket import ThreadTiming
from atoll.exchange.bucket.create import reliable, require_there
from atoll.exchange.bucket.move_out import MoveOut
from atoll.island.environment import surroundings_from_environment
from atoll.protocol.coordinator_state import Move
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
    replace_private(directory / RUN_FILE, run_file(settings).encode())
    note_served(directory, str(target), is_open=False)
    tokens = {role: token_file(directory, role) for role in Role}
    known = Credentials(surroundings_from_environment().credentials)
    known.remember(str(target), pin=pin, tokens=tokens)


def run_file(settings: RunSettings) -> str:
    """Return settings as the text of a run file."""
    lines = []
    for table, values in settings.to_dict().items():
        lines.append(f"[{table}]")
        for key, value in values.items():
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
        lines.append("")
    return "\n".join(lines)
