"""`atoll certify RUN NAME`: a certificate for a machine, where a run asks for one."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.run_names import complete, directory_of
from atoll.security.private_files import private_directory


def certify(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The run's directory on this machine, or its name.",
            autocompletion=complete,
            show_default=False,
        ),
    ],
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Of the island, or of its machine.", show_default=False
        ),
    ],
    into: Annotated[
        Path, typer.Option(metavar="DIR", help="Where NAME.pem is put.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a certificate for a machine that is to join a run.

    NAME.pem holds it and its key. The run's own authority signs it, which is made on
    the first call; served with --island-certificates DIR/authority.pem, a run lets in
    nobody without.
    """
    from atoll.security.certificates import issue_island_certificate, make_authority

    directory = private_directory(directory_of(run))
    authority = make_authority(directory, unix_s=time.time())
    file = issue_island_certificate(directory, name, into=into, unix_s=time.time())
    if as_json:
        said = {"certificate": str(file.absolute()), "authority": str(authority)}
        typer.echo(json.dumps(said))
        return
    typer.echo(f"certificate  {file.absolute()}")
    typer.echo(f"authority    {authority}")
    typer.echo(f"serve        with --island-certificates {shlex.quote(str(authority))}")
    typer.echo(
        f"join         atoll join INVITATION --certificate "
        f"{shlex.quote(file.name)} -- COMMAND"
    )
    typer.echo(
        f"atoll: {file.name} holds a key. Take it to its machine by a way that nobody "
        "else reads, and remove it here.",
        err=True,
    )
