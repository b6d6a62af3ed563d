"""`atoll export RUN OUT`: write the agreed weights of a run to files.

The weights come from the coordinator as a safetensors file, or from the objects of a
store. `--format hf` writes a directory that `from_pretrained` loads.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from atoll.bundle import Bundle
from atoll.bundle.definition import CONFIG, MANIFEST
from atoll.cli.run_names import RUN, locate_run, open_named
from atoll.cli.terminal import progress_bar
from atoll.disk import sync_directory
from atoll.errors import UsageError
from atoll.island.model_definition import definition_of, require_consent
from atoll.run_client import ExportedWeights
from atoll.safetensors import read_file_header


class ExportFormat(StrEnum):
    """The files to write."""

    SAFETENSORS = "safetensors"
    HF = "hf"


def export(
    run: Annotated[str, RUN],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="New .safetensors file, or new directory."),
    ] = None,
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
    ledger: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="New .csv file for the ledger of rows, without OUT."
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

    --ledger writes instead which rows of the data are in which update, as a table
    that pandas and polars read.
    """
    if ledger is not None:
        has_others = out is not None or round is not None or bundle is not None
        if has_others or export_format is not ExportFormat.SAFETENSORS:
            raise UsageError("--ledger writes no weights. Leave OUT and the rest out.")
        export_ledger(run, ledger, as_json=as_json)
        return
    if out is None:
        raise UsageError("Say where to write the weights: atoll export RUN OUT.")
    with closing(open_named(run)) as client, progress_bar("export") as progress:

        def write(file: Path) -> ExportedWeights:
            return client.export(file, round=round, progress=progress)

        if export_format is ExportFormat.HF:
            weights = export_hf(run, out, bundle, write)
        elif bundle is not None:
            raise UsageError("--bundle is for --format hf. Leave it out, or give that.")
        else:
            with draft_file(out) as draft:
                weights = write(draft)
    _show(weights, out, as_json=as_json)


def export_ledger(run: str, file: Path, *, as_json: bool) -> None:
    """Write the ledger of a run's rows into a new file."""
    with closing(open_named(run)) as client, draft_file(file) as draft:
        size_bytes = client.export_ledger(draft)
    if as_json:
        typer.echo(json.dumps({"file": str(file), "bytes": size_bytes}, indent=2))
    else:
        typer.echo(f"{file}: {size_bytes} bytes")


def _show(weights: ExportedWeights, out: Path, *, as_json: bool) -> None:
    if weights.moved_to is not None:
        typer.echo(
            f"atoll: the run has moved to {weights.moved_to}, and trains there. These "
            "are the weights that it left here.",
            err=True,
        )
    if as_json:
        facts = asdict(weights) | {"file": str(out)}
        facts.pop("moved_to")
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(
        f"{out}: round {weights.round}, {weights.tensors} tensors, "
        f"{weights.bytes} bytes"
    )
    if names := weights.constants:
        few = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        typer.echo(
            f"atoll: not in the file, because the run does not keep them: {few}. "
            "Take them from the model.",
            err=True,
        )


@contextmanager
def draft_file(out: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Give a new file that is renamed to `out` if the block succeeds.

    Raises:
        UsageError: `out` exists and is not to be replaced, or cannot be written.
    """
    with _renamed(out, replaces=replaces) as draft:
        draft.touch()
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _draft_directory(out: Path) -> Iterator[Path]:
    """Give a new directory that is renamed to `out` if the block succeeds."""
    with _renamed(out) as draft:
        draft.mkdir()
        yield draft
        for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
            sync_directory(folder)


@contextmanager
def _renamed(out: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Give a path that is renamed to `out` if the block succeeds, else removed."""
    if out.exists() and not replaces:
        raise UsageError(f"{out} exists already. Remove it, or choose another name.")
    draft = out.with_name(f"{out.name}.{secrets.token_hex(4)}~")
    try:
        yield draft
        draft.rename(out)
        sync_directory(out.absolute().parent)
    except OSError as exc:
        raise UsageError(
            f"{out} cannot be written: {exc.strerror or exc}. Choose another path."
        ) from exc
    finally:
        with suppress(OSError):
            draft.unlink()
        shutil.rmtree(draft, ignore_errors=True)


WEIGHTS = "model.safetensors"
TENSOR_ORDER = "atoll.model"
"""Key of the file's metadata: the order of the tensors, which only a run needs."""

WriteWeights = Callable[[Path], ExportedWeights]


def export_hf(
    run: str, out: Path, directory: Path | None, write_weights: WriteWeights
) -> ExportedWeights:
    """Write the directory that `from_pretrained` loads, or nothing.

    Raises:
        UsageError: `out` exists, nothing defines the model, or the model's tensors are
            not those of the run.
    """
    bundle, bundle_directory = _definition(run, directory)
    if CONFIG not in bundle.files:
        raise UsageError(
            f"The bundle has no {CONFIG}, so transformers could not load its "
            "model. Leave --format out, or give a directory that has one: --bundle DIR."
        )
    with _draft_directory(out) as draft:
        weights = write_weights(draft / WEIGHTS)
        _rename_tensors(
            draft / WEIGHTS, bundle_directory, trust_remote_code=bool(bundle.code)
        )
        for name, content in bundle.files.items():
            if name != MANIFEST:
                _write(draft / name, content)
    return weights


def _definition(run: str, directory: Path | None) -> tuple[Bundle, Path]:
    """Return the files that define the model, and their directory."""
    if directory is not None:
        return Bundle.of_directory(directory, leaves_weights=True), directory
    remedy = "give a directory that has its config.json: --bundle DIR"
    definition = definition_of(str(locate_run(run)), remedy=remedy)
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
