"""A coordinator as `atoll serve` runs it: found again by this user's commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from atoll.cli import init_file
from atoll.cli.certify import own_certificate
from atoll.cli.names import Names, note_served
from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.http.listener import raise_soft_limit
from atoll.island.environment import surroundings_from_environment
from atoll.security import Credentials, Role, parse_run_url, token_file
from atoll.security.private_files import private_directory
from atoll.settings import RunSettings

if TYPE_CHECKING:  # an extra
    from atoll.telemetry.tensorboard import TensorBoardWriter

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""How this machine reaches what listens on every interface."""


@dataclass(frozen=True)
class Serving:
    """A coordinator that listens, and the address by which this machine reaches it."""

    coordinator: Coordinator
    url: str
    is_within_reach: bool
    """Whether this user's commands can call it: they may have no certificate."""

    def tell(self, *, as_json: bool) -> None:
        """Print where the run is, and how others get there."""
        facts = self._facts()
        if as_json:
            typer.echo(json.dumps(facts))
            return
        tokens = facts.pop("tokens")
        name = shlex.quote(facts.pop("name"))
        facts.update({f"{role} token": path for role, path in tokens.items()})
        facts.update({"look": f"atoll status {name}"})
        if facts["pin"]:
            facts["invite"] = f"atoll invite {name}"
        for key, value in facts.items():
            typer.echo(f"{key:<14} {value or 'none: plain HTTP, on this machine only'}")

    def _facts(self) -> dict[str, Any]:
        directory = self.coordinator.directory
        return {
            "run": self.coordinator.run,
            "name": self.coordinator.status()["name"],
            "directory": str(directory),
            "url": self.url,
            "pin": self.coordinator.pin,
            "tokens": {role.value: str(token_file(directory, role)) for role in Role},
        }


@contextmanager
def serving(
    directory: Path,
    settings: RunSettings | None,
    listening: ListenOptions,
    *,
    init: Path | None,
    has_tensorboard: bool,
) -> Iterator[Serving]:
    """Serve a run while the block lasts."""
    raise_soft_limit()
    private_directory(directory)
    with ExitStack() as undo:
        curves = _curves(directory) if has_tensorboard else None
        if curves:
            undo.callback(curves.close)
        init_file.settle(directory, settings, init)
        coordinator = Coordinator(directory, settings, listening=listening)
        undo.callback(coordinator.close)
        if curves:
            coordinator.events.subscribe(curves, name="tensorboard")
        url = _local_url(coordinator.url)
        coordinator.start()
        own = own_certificate(directory, listening.island_certificates)
        _remember(coordinator, url, own)
        note_served(directory, url, is_open=True)
        undo.callback(note_served, directory, url, is_open=False)
        is_within_reach = own is not None or listening.island_certificates is None
        yield Serving(coordinator, url, is_within_reach)


def _local_url(url: str) -> str:
    said = parse_run_url(url)
    host = LOOPBACK.get(said.address.host, said.address.host)
    host = f"[{host}]" if ":" in host else host
    return str(parse_run_url(f"{said.scheme}://{host}:{said.address.port}"))


def _remember(coordinator: Coordinator, url: str, certificate: Path | None) -> None:
    """Let this user's commands find the run by its URL and by its names."""
    surroundings = surroundings_from_environment()
    tokens = {role: token_file(coordinator.directory, role) for role in Role}
    known = Credentials(surroundings.credentials)
    known.remember(url, pin=coordinator.pin, tokens=tokens, certificate=certificate)
    for name in (coordinator.run, coordinator.status()["name"]):
        Names(surroundings).remember(name, url)


def _curves(directory: Path) -> TensorBoardWriter:
    from atoll.telemetry.tensorboard import TensorBoardWriter

    return TensorBoardWriter(directory / "tensorboard")
