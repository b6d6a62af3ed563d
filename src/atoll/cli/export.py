"""`atoll export RUN OUT`: write the agreed weights of a run to files.

The weights come from the coordinator as a safetensors file, or from the objects of a
store. `--format hf` writes a directory that `from_pretrained` loads.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from atoll.bundle import Bundle
from atoll.bundle.definition import CONFIG, MANIFEST
from atoll.cli.coordinator_client import CoordinatorClient
from atoll.cli.run_names import RUN, StoreUrl, locate_run
from atoll.cli.store_run import StoreObserver
from atoll.coordinator.anchor_file import FilePlan, listed_rounds
from atoll.disk import sync_directory
from atoll.errors import CorruptError, Refused, Unreachable, UsageError
from atoll.exchange.base import verified
from atoll.exchange.bucket.large_objects import ConstantObjects
from atoll.exchange.bucket.states import BucketHistory
from atoll.http import Download, HttpReply
from atoll.island.model_definition import definition_of, require_consent
from atoll.safetensors import read_file_header
from atoll.security import RunUrl
from atoll.weights import FragmentState

TRIES = 120
PAUSE_S = 0.5
"""Attempts and the pause between them: together longer than the commit of a round. A
download that breaks off continues as often."""

FILE_S = 600.0
"""Timeout of a reply: a coordinator writes a large file before it sends any of it."""


class ExportFormat(StrEnum):
    """The files to write."""

    SAFETENSORS = "safetensors"
    HF = "hf"


def export(
    run: Annotated[str, RUN],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="New .safetensors file, or new directory."),
    ],
    round: Annotated[
        int | None,
        typer.Option(min=0, help="Round to export, if kept. Default: the newest."),
    ] = None,
    export_format: Annotated[
        ExportFormat,
        typer.Option("--format", help="hf writes a directory for from_pretrained."),
    ] = ExportFormat.SAFETENSORS,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With hf, directory with config.json of the model."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write agreed weights into a safetensors file.

    The weights are the newest, or those of --round. The file has every trained
    parameter and floating buffer in its own dtype, and the constants (frozen
    parameters, integer buffers) that the run keeps; the command names those that it
    does not keep. A tied tensor has its first name only. --format hf also writes the
    configuration and the tokenizer of the run's bundle.
    """
    location = locate_run(run)
    if export_format is ExportFormat.HF:
        facts = export_hf(
            location, out, bundle, lambda file: write_weights(location, file, round)
        )
    elif bundle is not None:
        raise UsageError("--bundle is for --format hf. Leave it out, or give that.")
    else:
        with _draft(out) as draft:
            facts = write_weights(location, draft, round)
    facts["file"] = str(out)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        typer.echo(
            f"{out}: round {facts['round']}, {facts['tensors']} tensors, "
            f"{facts['bytes']} bytes"
        )
        _print_missing(facts["constants"])


def write_weights(
    location: StoreUrl | RunUrl, file: Path, round: int | None
) -> dict[str, Any]:
    """Write the agreed weights into a file, and return the facts in its header."""
    if isinstance(location, StoreUrl):
        size_bytes = _from_store(location, file, round)
    else:
        size_bytes = _from_coordinator(location, file, round)
    return _facts(file, size_bytes)


def _from_store(location: StoreUrl, draft: Path, round: int | None) -> int:
    with StoreObserver(location.url) as observer, _bar() as progress:
        observer.reader.read_controls()
        moved_to = observer.reader.view.moved_to
        if moved_to is not None:
            typer.echo(
                f"atoll: the run has moved to {moved_to}, and trains there. These are "
                "the weights that it left here.",
                err=True,
            )
        return write_anchor(observer, draft, round=round, progress=progress)


def _from_coordinator(url: RunUrl, draft: Path, round: int | None) -> int:
    with CoordinatorClient.of(url) as client:
        client.get("/health")  # fail now if the coordinator is away, without retries
        return int(_fetch(client, draft, round).headers["content-length"])


def _fetch(client: CoordinatorClient, draft: Path, round: int | None) -> HttpReply:
    target = "/anchor" if round is None else f"/anchor?round={round}"

    def open_buffer(size: int) -> memoryview:
        # Download into the file's mapping, so that no second copy is in memory.
        return memoryview(np.memmap(draft, np.uint8, "w+", shape=(size,)).data)

    with _bar() as progress:
        download = Download(open_buffer, progress)
        return _retry(
            lambda: client.call("GET", target, download=download, timeout_s=FILE_S)
        )


def _retry(fetch: Callable[[], HttpReply]) -> HttpReply:
    """Retry while a round is being committed, or the network fails.

    A download that broke off continues where it stopped.
    """
    for _ in range(TRIES - 1):
        with suppress(Unreachable):
            return fetch()
        time.sleep(PAUSE_S)
    return fetch()


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    with typer.progressbar(length=1, label="export", file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield show


@contextmanager
def _draft(out: Path) -> Iterator[Path]:
    """Give a file that is renamed to `out` if the block succeeds."""
    if out.exists():
        raise UsageError(f"{out} exists already. Remove it, or choose another name.")
    draft = out.with_name(f"{out.name}.{secrets.token_hex(4)}~")
    try:
        draft.touch()
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.rename(out)
    except OSError as exc:
        raise UsageError(
            f"{out} cannot be written: {exc.strerror or exc}. Choose another path."
        ) from exc
    finally:
        with suppress(OSError):
            draft.unlink()


def _facts(draft: Path, sent_bytes: int) -> dict[str, Any]:
    """Return the facts in the header of a file.

    Raises:
        CorruptError: it is not a complete safetensors file.
    """
    with draft.open("rb") as file:
        header = read_file_header(file, source=RECEIVED)
    try:
        metadata = header.metadata
        model = json.loads(metadata["atoll.model"])
        facts = {
            "run": metadata["atoll.run"],
            "round": int(metadata["atoll.round"]),
            "rounds": json.loads(metadata["atoll.rounds"]),
            "tensors": len(header.arrays),
            "bytes": sent_bytes,
            "constants": [
                row[0]
                for row in model
                if row[3] == "constant" and row[0] not in header.arrays
            ],
        }
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise CorruptError(INCOMPLETE) from exc
    if header.file_bytes != sent_bytes:
        raise CorruptError(INCOMPLETE)
    return facts


RECEIVED = "The received data"
INCOMPLETE = "The received data is not a complete safetensors file. Export it again."


def _print_missing(names: list[str]) -> None:
    if names:
        few = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        typer.echo(
            f"atoll: not in the file, because the run does not keep them: {few}. "
            "Take them from the model.",
            err=True,
        )


WEIGHTS = "model.safetensors"
TENSOR_ORDER = "atoll.model"
"""Key of the file's metadata: the order of the tensors, which only a run needs."""

Facts = dict[str, Any]
WriteWeights = Callable[[Path], Facts]


def export_hf(
    location: StoreUrl | RunUrl,
    out: Path,
    directory: Path | None,
    write_weights: WriteWeights,
) -> Facts:
    """Write the directory that `from_pretrained` loads, or nothing; return the facts.

    Raises:
        UsageError: `out` exists, nothing defines the model, or the model's tensors are
            not those of the run.
    """
    bundle, bundle_directory = _definition(location, directory)
    if CONFIG not in bundle.files:
        raise UsageError(
            f"The bundle has no {CONFIG}, so transformers could not load its "
            "model. Leave --format out, or give a directory that has one: --bundle DIR."
        )
    with _draft_directory(out) as draft:
        facts = write_weights(draft / WEIGHTS)
        _rename_tensors(
            draft / WEIGHTS, bundle_directory, trust_remote_code=bool(bundle.code)
        )
        for name, content in bundle.files.items():
            if name != MANIFEST:
                _write(draft / name, content)
    return facts


def _definition(
    location: StoreUrl | RunUrl, directory: Path | None
) -> tuple[Bundle, Path]:
    """Return the files that define the model, and their directory."""
    if directory is not None:
        return Bundle.of_directory(directory, leaves_weights=True), directory
    remedy = "give a directory that has its config.json: --bundle DIR"
    definition = definition_of(str(location), remedy=remedy)
    require_consent(definition)
    return definition.bundle, definition.directory


def _rename_tensors(file: Path, directory: Path, *, trust_remote_code: bool) -> None:
    """Give every tensor the name that `from_pretrained` looks for."""
    saved_names = _saved_names()
    with file.open("r+b") as opened:
        header = read_file_header(opened, source=str(file))
        metadata = {k: v for k, v in header.metadata.items() if k != TENSOR_ORDER}
        names = saved_names(
            directory, header.arrays.keys(), trust_remote_code=trust_remote_code
        )
        renamed = {names[name]: array for name, array in header.arrays.items()}
        # The header without the order is shorter: padding keeps the data in place.
        opened.seek(0)
        opened.write(replace(header, arrays=renamed, metadata=metadata).pack())
        opened.flush()
        os.fsync(opened.fileno())


def _saved_names() -> Callable[..., dict[str, str]]:
    try:
        from atoll.integrations.transformers import saved_names
    except ModuleNotFoundError as exc:
        if exc.name not in ("torch", "transformers"):
            raise
        raise UsageError(
            f"--format hf needs {exc.name}, which is not installed. Install it: pip "
            'install "atoll[transformers]".'
        ) from exc
    return saved_names


def _write(path: Path, content: bytes) -> None:
    """Write a durable file with the permissions of the user's umask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _draft_directory(out: Path) -> Iterator[Path]:
    """Give a directory that is renamed to `out` if the block succeeds."""
    if out.exists():
        raise UsageError(f"{out} exists already. Remove it, or choose another name.")
    draft = out.with_name(f"{out.name}.{secrets.token_hex(4)}~")
    try:
        draft.mkdir()
        yield draft
        for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
            sync_directory(folder)
        draft.rename(out)
        sync_directory(out.absolute().parent)
    except OSError as exc:
        raise UsageError(
            f"{out} cannot be written: {exc.strerror or exc}. Choose another path."
        ) from exc
    finally:
        shutil.rmtree(draft, ignore_errors=True)


ReadFragment = Callable[[int], FragmentState]
Progress = Callable[[int, int], None]


def write_anchor(
    observer: StoreObserver, file: Path, *, round: int | None, progress: Progress | None
) -> int:
    """Write the newest anchor, or that of a round, into a file; return its size.

    Holds one fragment in memory at a time.

    Raises:
        Refused: the run has no weights yet, or the round is not kept.
        CorruptError: an object does not verify.
    """
    founded, layout = observer.reader.founded, observer.reader.view.layout
    if founded is None:
        raise Refused(
            "The run has no weights yet: its first island brings them. Repeat when "
            "one has joined."
        )
    read = _reader(observer, round)
    plan = FilePlan.of(
        founded.run,
        founded.model,
        fragments=len(layout),
        kept_constants=founded.constants,
    )
    objects = ConstantObjects(observer.reader.store, founded)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        rounds = []
        for index, fragment in enumerate(layout):
            state = read(index)
            plan.write(handle, fragment, state.anchor, 0)
            rounds.append(state.round)
            if progress is not None:
                progress(index + 1, len(layout))
        for constant in plan.constants:
            offset = plan.head_bytes + plan.offsets[constant.name][0]
            for part in verified(constant, objects.parts(constant)):
                offset += os.pwrite(handle, part, offset)
        os.truncate(handle, plan.size_bytes)
        os.pwrite(handle, plan.head(rounds), 0)
    finally:
        os.close(handle)
    return plan.size_bytes


def _reader(observer: StoreObserver, round: int | None) -> ReadFragment:
    if round is None:
        return observer.states.read
    past = BucketHistory(observer.reader, observer.outcomes)
    rounds = past.rounds()
    if round not in rounds:
        raise Refused(
            f"The anchor of round {round} is not kept: {listed_rounds(rounds)} are "
            "available. Leave the round out to export the newest of each fragment."
        )
    return lambda fragment: past.state(fragment, round)
