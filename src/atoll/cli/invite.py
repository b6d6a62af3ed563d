"""`atoll invite RUN`: print a command that makes another machine an island."""

from __future__ import annotations

import json
import shlex
import socket
from contextlib import closing
from typing import Annotated

import typer

from atoll import security
from atoll.cli.run_names import RUN, coordinator_url
from atoll.errors import UsageError
from atoll.run_client.coordinator import CoordinatorClient, credential_paths_for

ANY_INTERFACE = ("0.0.0.0", "::")
REMOTE_ADDRESS = ("192.0.2.1", 9)
"""An address of TEST-NET-1, to find the interface to other machines. No packet is
sent."""


def invite(
    run: Annotated[str, RUN],
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="Address of this machine for the other one."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a command for another machine to join a run; for operators.

    The command holds a code that admits one machine, once, within an hour. Replace
    COMMAND by the training script there.
    """
    url = coordinator_url(run)
    with CoordinatorClient.of(url, role=security.Role.OPERATOR) as client:
        _require_tls(url)
        status = client.get("/status")
        target = _address(url, security.parse_run_url(status["listening"]), address)
        code = security.Secret(client.post("/invites")["code"])
    paths = credential_paths_for(url)
    credential = security.Credentials(paths.credentials).find(str(url))
    pin = credential.pin if credential else None
    invitation = security.Invite(address=target, run=status["run"], pin=pin, code=code)
    certificate_option = " --certificate NAME.pem" if paths.certificate else ""
    if as_json:
        typer.echo(json.dumps({"invite": invitation.reveal(), "run": status["run"]}))
    else:
        typer.echo(f"atoll join '{invitation.reveal()}'{certificate_option} -- COMMAND")
    if certificate_option:
        typer.echo(
            "atoll: this run requires certificates. Make NAME.pem where it is served: "
            f"atoll certify {shlex.quote(status['name'])} NAME",
            err=True,
        )
    if security.is_loopback(target.host):
        typer.echo(
            "atoll: the coordinator listens on this machine only, so no other machine "
            "can use this. Serve with --listen 0.0.0.0 for others.",
            err=True,
        )


def _require_tls(url: security.RunUrl) -> None:
    if not url.has_tls:
        raise UsageError(
            f"{url} is plain HTTP, which is for this machine only: no other machine "
            "can be invited. Serve without --no-tls."
        )


def _address(
    url: security.RunUrl, listening: security.RunUrl, requested: str | None
) -> security.Address:
    """Return the coordinator's address for the other machine."""
    port = url.address.port
    if requested is not None:
        return security.parse_address(requested, usual_port=port)
    if not security.is_loopback(url.address.host):
        return url.address
    if listening.address.host not in ANY_INTERFACE:
        return listening.address
    return security.Address(_own_host(), port)


def _own_host() -> str:
    """Return the address of this machine's interface to other machines.

    Raises:
        UsageError: it has none.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(REMOTE_ADDRESS)
        except OSError as exc:
            raise UsageError(
                f"This machine has no route to others ({exc.strerror}). Give the "
                "address by which they reach it: --address HOST"
            ) from exc
        return str(probe.getsockname()[0])
