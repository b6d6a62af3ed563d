"""`atoll init URL RUN.toml`: make a run in a store, without a coordinator."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.run_file import Assignments, RunFile, settings_of
from atoll.cli.run_names import HTTP_PREFIXES
from atoll.errors import NoSuchObject, UsageError
from atoll.island.environment import credentials_from_environment
from atoll.run_client.location import RunNames
from atoll.settings import RunSettings

if TYPE_CHECKING:  # imported where needed: stores are slow to import
    from atoll.bundle import Bundle
    from atoll.exchange.bucket.documents import SettingsDocument
    from atoll.store import Store


def init(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Store: s3://, gs://, az://, file:// or one of fsspec; or a path.",
            show_default=False,
        ),
    ],
    run_file: RunFile,
    assignments: Assignments = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--init", metavar="FILE", help="First weights, a file of atoll export."
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Definition of the model: configuration, code, tokenizer.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a run in a store, without a coordinator.

    Its first island brings the weights, unless --init gives them. Write access to the
    store allows a user to join the run and to control it; there is no other credential.
    """
    from atoll.bundle import Bundle, defined_by
    from atoll.exchange.bucket.create import reliable, require_no_coordinator
    from atoll.runtime import SystemRuntime

    location = _store_url(url)
    packed = None if bundle is None else Bundle.of_directory(bundle)
    settings = defined_by(packed, settings_of(run_file, assignments))
    require_no_coordinator(location)
    runtime = SystemRuntime()
    try:
        store = reliable(location, runtime.sleep)
        document = _make(store, settings, weights, packed, url=location)
    finally:
        runtime.close()
    names = RunNames(credentials_from_environment())
    names.remember(document.run, location)
    names.remember(settings.run.name, location)
    _print_commands(document, location, is_founded=weights is not None, as_json=as_json)


def _store_url(url: str) -> str:
    if url.startswith(HTTP_PREFIXES):
        raise UsageError(
            f"{url} is a coordinator's URL, and a run with one is made by `atoll serve "
            "RUN.toml`. Give a store: s3://BUCKET/PATH, or a path."
        )
    if re.match(r"(s3|gs|az|file):/(?!/)", url, re.IGNORECASE):
        raise UsageError(
            f"{url} has one slash after its colon, and a store's URL has two. "
            f"Write ./{url} for a directory of that name."
        )
    return url if "://" in url else str(Path(url).expanduser().absolute())


def _make(
    store: Store,
    settings: RunSettings,
    weights: Path | None,
    bundle: Bundle | None,
    *,
    url: str,
) -> SettingsDocument:
    """Make the run; with weights also found it, or resume an interrupted call."""
    from atoll.exchange.base import Frame
    from atoll.exchange.bucket.create import found_run, make_run

    if weights is None:
        return make_run(store, settings, url=url, bundle=bundle)
    from atoll.coordinator.initial_weights import WeightsFile

    file = WeightsFile(weights)
    model = file.model()
    if model is None:
        raise UsageError(
            f"{weights} does not have the order of its model's tensors, as a file of "
            "`atoll export` does, and there is no coordinator that could wait for an "
            "island to send it. Leave --init out, and let the first island load the "
            "file: it founds the run with its weights."
        )
    file.states(model, settings, run="judged")  # raises before anything is written
    constants = file.constants(model, settings)
    document = _unfounded(store, settings) or make_run(
        store, settings, url=url, bundle=bundle
    )
    states = file.states(model, settings, run=document.run)
    frames = [Frame(*state) for state in states]
    found_run(store, document, model, frames, constants)
    return document


def _unfounded(store: Store, settings: RunSettings) -> SettingsDocument | None:
    """Return the unfounded run that an earlier call made with these settings."""
    from atoll.exchange.bucket import documents, keys

    try:
        document = documents.fetch(store, documents.SETTINGS, keys.SETTINGS)
    except NoSuchObject:
        return None
    if document.settings.fingerprint != settings.fingerprint:
        return None  # `make_run` refuses it, with the reason
    try:
        store.get(keys.RUN, 0, 1)
    except NoSuchObject:
        return document
    return None


def _print_commands(
    document: SettingsDocument, url: str, *, is_founded: bool, as_json: bool
) -> None:
    facts: dict[str, Any] = {
        "run": document.run,
        "name": document.settings.run.name,
        "url": url,
        "founded": is_founded,
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    quoted = shlex.quote(url)
    typer.echo(f"run   {document.run}")
    typer.echo(f"url   {url}")
    typer.echo(f"join  atoll join {quoted} -- COMMAND")
    typer.echo(f"look  atoll status {quoted}")
