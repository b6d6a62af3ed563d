"""`atoll invite RUN`: one paste that makes another machine an island."""

from __future__ import annotations

import json
import shlex
import socket
from contextlib import closing
from typing import Annotated

import typer

from atoll.cli.coordinator_client import Asking, surroundings_for
from atoll.cli.run_names import RUN
from atoll.errors import UsageError
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
    around = surroundings_for(asking.url)
    known = Credentials(around.credentials).find(str(asking.url))
    pin = known.pin if known else None
    paste = Invite(address=where, run=status["run"], pin=pin, code=code)
    show = " --certificate NAME.pem" if around.certificate else ""
    if as_json:
        typer.echo(json.dumps({"invite": paste.reveal(), "run": status["run"]}))
    else:
        typer.echo(f"atoll join '{paste.reveal()}'{show} -- COMMAND")
    if show:
        typer.echo(
            "atoll: this run asks for certificates. Make NAME.pem where it is served: "
            f"atoll certify {shlex.quote(status['name'])} NAME",
            err=True,
        )
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
