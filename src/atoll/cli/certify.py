"""`atoll certify RUN NAME`: issue a certificate for a machine of a run."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.run_names import complete_run_name, local_directory
from atoll.security.private_files import private_directory


def certify(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Directory of the run on this machine, or its name.",
            autocompletion=complete_run_name,
            show_default=False,
        ),
    ],
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the island, or of its machine.",
            show_default=False,
        ),
    ],
    into: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for NAME.pem.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a certificate for a machine of a run.

    NAME.pem holds the certificate and its key. The run's own authority signs it; the
    first call makes that authority. A run that is served with --island-certificates
    DIR/authority.pem admits only clients with such a certificate.
    """
    from atoll.security.certificates import issue_island_certificate, make_authority

    directory = private_directory(local_directory(run))
    authority = make_authority(directory, unix_s=time.time())
    file = issue_island_certificate(directory, name, into=into, unix_s=time.time())
    if as_json:
        paths = {"certificate": str(file.absolute()), "authority": str(authority)}
        typer.echo(json.dumps(paths))
        return
    typer.echo(f"certificate  {file.absolute()}")
    typer.echo(f"authority    {authority}")
    typer.echo(f"serve        with --island-certificates {shlex.quote(str(authority))}")
    typer.echo(
        f"join         atoll join INVITATION --certificate "
        f"{shlex.quote(file.name)} -- COMMAND"
    )
    typer.echo(
        f"atoll: {file.name} holds a private key. Copy it to its machine over a secure "
        "channel, and remove it here.",
        err=True,
    )
