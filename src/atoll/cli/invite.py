"""`atoll invite RUN`: one paste that makes another machine an island."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from typing import Annotated

import typer

from atoll.cli.asking import Asking
from atoll.cli.names import RUN
from atoll.errors import UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.security import (
    Address,
    Credentials,
    Invite,
    Role,
    RunUrl,
    Secret,
    is_loopback,
    parse_address,
    parse_run_url,
)

EVERYWHERE = ("0.0.0.0", "::")
ELSEWHERE = ("192.0.2.1", 9)
"""An address of nobody's; nothing is sent to learn which way leads there."""


def invite(
    run: Annotated[str, RUN],
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="By which the other machine reaches this one."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the command to paste on another machine; for operators.

    It holds a code that opens the run once, within an hour. Give COMMAND there: the
    script that trains.
    """
    with Asking.of(run, role=Role.OPERATOR) as asking:
        _require_tls(asking.url)
        status = asking.get("/status")
        where = _address(asking.url, parse_run_url(status["listening"]), address)
        code = Secret(asking.post("/invites")["code"])
    paste = Invite(address=where, run=status["run"], pin=_pin(asking.url), code=code)
    if as_json:
        typer.echo(json.dumps({"invite": paste.reveal(), "run": status["run"]}))
    else:
        typer.echo(f"atoll join '{paste.reveal()}' -- COMMAND")
    if is_loopback(where.host):
        typer.echo(
            "atoll: the coordinator listens on this machine only, so that nobody else "
            "can use this. Serve with --listen 0.0.0.0 for others.",
            err=True,
        )


def _require_tls(url: RunUrl) -> None:
    if not url.has_tls:
        raise UsageError(
            f"{url} is plain HTTP, which is for this machine only: nobody can be "
            "invited. Serve without --no-tls."
        )


def _pin(url: RunUrl) -> str | None:
    surroundings = surroundings_from_environment()
    known = Credentials(surroundings.credentials).find(str(url))
    return known.pin if known else None


def _address(asked: RunUrl, listening: RunUrl, given: str | None) -> Address:
    """Return by which address the other machine is to call."""
    port = asked.address.port
    if given is not None:
        return parse_address(given, usual_port=port)
    if not is_loopback(asked.address.host):
        return asked.address
    if listening.address.host not in EVERYWHERE:
        return listening.address
    return Address(_own_host(), port)


def _own_host() -> str:
    """Return the address of this machine on the way to others.

    Raises:
        UsageError: there is no such way.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(ELSEWHERE)
        except OSError as exc:
            raise UsageError(
                f"This machine has no way to others ({exc.strerror}). Give the address "
                "by which they reach it: --address HOST"
            ) from exc
        return str(probe.getsockname()[0])
