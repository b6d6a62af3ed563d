"""`atoll telemetry WHAT`: files for Grafana and Prometheus."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from atoll.cli.run_names import RUN, local_directory
from atoll.errors import UsageError
from atoll.run_client.location import read_address
from atoll.security import Role, parse_run_url, token_file
from atoll.telemetry import grafana


class TelemetryFile(StrEnum):
    """A file for another tool."""

    GRAFANA = "grafana"
    RULES = "rules"
    SCRAPE = "scrape"


def telemetry(
    file: Annotated[
        TelemetryFile, typer.Argument(help="File to print.", show_default=False)
    ],
    run: Annotated[str | None, RUN] = None,
) -> None:
    """Print a Grafana dashboard, alert rules, or a scrape config.

    grafana prints the dashboard as JSON, for Grafana's import; rules prints alert
    rules for Prometheus. scrape prints the scrape configuration of a RUN that is served
    on this machine, with its address, token file and certificate.
    """
    if (file is TelemetryFile.SCRAPE) != (run is not None):
        raise UsageError(
            "Only scrape needs a run: atoll telemetry scrape RUN, and atoll telemetry "
            "grafana or rules alone."
        )
    if run is not None:
        typer.echo(_scrape(run), nl=False)
    elif file is TelemetryFile.GRAFANA:
        typer.echo(json.dumps(grafana.dashboard(), indent=2))
    else:
        typer.echo(grafana.rules(), nl=False)


def _scrape(run: str) -> str:
    directory = local_directory(run)
    location = read_address(directory)
    if location is None:
        raise UsageError(
            f"{directory} has not been served yet. Start it: atoll serve RUN.toml."
        )
    url = parse_run_url(location.url)
    return grafana.scrape(
        address=str(url.address),
        has_tls=location.url.startswith("https"),
        token_file=str(token_file(directory, Role.ISLAND)),
        ca_file=str(directory / "certificate.pem"),
    )
