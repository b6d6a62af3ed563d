"""`atoll export RUN OUT`: the agreed weights, as a safetensors file or for others.

`atoll export --format hf`: a directory that `from_pretrained` loads.

The agreed weights of a run in a store, as a safetensors file.
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
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from atoll.bundle import Bundle
from atoll.bundle.definition import CONFIG, MANIFEST
from atoll.cli.coordinator_client import Asking
from atoll.cli.run_names import RUN, StoreUrl, place_of
from atoll.cli.store_run import Observing
from atoll.coordinator.anchor_file import FilePlan, listed_rounds
from atoll.disk import sync_directory
from atoll.errors import CorruptError, Refused, Unreachable, UsageError
from atoll.exchange.base import verified
from atoll.exchange.bucket.large_objects import ConstantObjects
from atoll.exchange.bucket.states import BucketHistory
from atoll.http import Download, HttpReply
from atoll.island.model_definition import definition_of, require_consent
from atoll.security import RunUrl
from atoll.weights import FragmentState

TRIES = 120
PAUSE_S = 0.5
"""A round that is being committed takes no longer than all tries together; a body
that breaks goes on as often."""

MAX_HEAD_BYTES = 100_000_000
"""As safetensors itself has it."""

FILE_S = 600.0
"""Writing a large file there takes its time before the first byte comes."""


class Form(StrEnum):
    """What is written."""

    SAFETENSORS = "safetensors"
    HF = "hf"


def export(
    run: Annotated[str, RUN],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A new .safetensors file, or directory."),
    ],
    round: Annotated[
        int | None,
        typer.Option(min=0, help="Those of a round, while it is kept."),
    ] = None,
    form: Annotated[
        Form,
        typer.Option("--format", help="hf: a directory for from_pretrained."),
    ] = Form.SAFETENSORS,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With hf: has config.json, if the run has no bundle."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write agreed weights into a safetensors file.

    The weights are the newest, or those of --round. Every trained parameter and
    floating buffer is in the file, in its own dtype, and the constants (frozen
    parameters, integer buffers) that the run keeps; what it does not keep is named.
    A tied tensor is there once, by its first name. With --format hf the configuration
    and the tokenizer of the run's bundle are written beside them.
    """
    place = place_of(run)
    if form is Form.HF:
        facts = export_hf(place, out, bundle, lambda file: take(place, file, round))
    elif bundle is not None:
        raise UsageError("--bundle is for --format hf. Leave it out, or say that.")
    else:
        with _draft(out) as draft:
            facts = take(place, draft, round)
    facts["file"] = str(out)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        typer.echo(
            f"{out}: round {facts['round']}, {facts['tensors']} tensors, "
            f"{facts['bytes']} bytes"
        )
        _tell_constants(facts["constants"])


def take(place: StoreUrl | RunUrl, file: Path, round: int | None) -> dict[str, Any]:
    """Write the agreed weights into a file, and return what it says of itself."""
    if isinstance(place, StoreUrl):
        size_bytes = _from_store(place, file, round)
    else:
        size_bytes = _from_coordinator(place, file, round)
    return _facts(file, size_bytes)


def _from_store(place: StoreUrl, draft: Path, round: int | None) -> int:
    with Observing(place.url) as observing, _bar() as progress:
        observing.reader.read_controls()
        moved_to = observing.reader.view.moved_to
        if moved_to is not None:
            typer.echo(
                f"atoll: the run has moved to {moved_to}, and trains there. These are "
                "the weights that it left here.",
                err=True,
            )
        return write_anchor(observing, draft, round=round, progress=progress)


def _from_coordinator(url: RunUrl, draft: Path, round: int | None) -> int:
    with Asking.of(url) as asking:
        asking.get("/health")  # one that is not there is not worth waiting for
        return int(_fetch(asking, draft, round).headers["content-length"])


def _fetch(asking: Asking, draft: Path, round: int | None) -> HttpReply:
    target = "/anchor" if round is None else f"/anchor?round={round}"

    def into(size: int) -> memoryview:
        # The file itself is the memory: nothing of it is kept twice.
        return memoryview(np.memmap(draft, np.uint8, "w+", shape=(size,)).data)

    with _bar() as progress:
        fetching = Download(into, progress)
        return _again(
            lambda: asking.call("GET", target, fetching=fetching, timeout_s=FILE_S)
        )


def _again(fetch: Callable[[], HttpReply]) -> HttpReply:
    """Ask until no round is in the way, or the network has failed too often.

    A body that broke off goes on where it was.
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
    with typer.progressbar(length=1, label="taking", file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield show


@contextmanager
def _draft(out: Path) -> Iterator[Path]:
    """Give a file that takes the name `out` when the block has ended well."""
    if out.exists():
        raise UsageError(f"{out} is there already. Remove it, or choose another name.")
    draft = out.with_name(f"{out.name}.{secrets.token_hex(4)}~")
    try:
        draft.touch()
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.rename(out)
    except OSError as exc:
        raise UsageError(
            f"{out} cannot be written: {exc.strerror or exc}. Choose another place."
        ) from exc
    finally:
        with suppress(OSError):
            draft.unlink()


def _facts(draft: Path, sent_bytes: int) -> dict[str, Any]:
    """Return what the file says of itself.

    Raises:
        CorruptError: it is not a whole safetensors file.
    """
    try:
        with draft.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(min(size, MAX_HEAD_BYTES)))
        said = head.pop("__metadata__")
        last = max(each["data_offsets"][1] for each in head.values())
        model = json.loads(said["atoll.model"])
        is_whole = 8 + size + last == sent_bytes == draft.stat().st_size
        facts = {
            "run": said["atoll.run"],
            "round": int(said["atoll.round"]),
            "rounds": json.loads(said["atoll.rounds"]),
            "tensors": len(head),
            "bytes": sent_bytes,
            "constants": [
                row[0] for row in model if row[3] == "constant" and row[0] not in head
            ],
        }
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise CorruptError(_NOT_WHOLE) from exc
    if not is_whole:
        raise CorruptError(_NOT_WHOLE)
    return facts


_NOT_WHOLE = "What came is not a whole safetensors file. Take it again."


def _tell_constants(names: list[str]) -> None:
    if names:
        few = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        typer.echo(
            f"atoll: not in the file, because the run does not keep them: {few}. "
            "Take them from the model.",
            err=True,
        )


WEIGHTS = "model.safetensors"
UNKNOWN = "atoll.model"
"""Of the file's own words: the order of the model's tensors, which only a run needs."""

Facts = dict[str, Any]
Take = Callable[[Path], Facts]


def export_hf(
    place: StoreUrl | RunUrl, out: Path, directory: Path | None, take: Take
) -> Facts:
    """Write what `from_pretrained` loads, whole or not at all; return what it is.

    Raises:
        UsageError: something is at `out`; nothing says what the model is; or its
            tensors are not the run's.
    """
    bundle, where = _definition(place, directory)
    if CONFIG not in bundle.files:
        raise UsageError(
            f"The bundle has no {CONFIG}, so that transformers could not load its "
            "model. Leave --format out, or give a directory that has one: --bundle DIR."
        )
    with _draft_directory(out) as draft:
        facts = take(draft / WEIGHTS)
        _call_as_saved(draft / WEIGHTS, where, trust_remote_code=bool(bundle.code))
        for name, content in bundle.files.items():
            if name != MANIFEST:
                _write(draft / name, content)
    return facts


def _definition(
    place: StoreUrl | RunUrl, directory: Path | None
) -> tuple[Bundle, Path]:
    """Return the files that define the model, and where they are."""
    if directory is not None:
        return Bundle.of_directory(directory, leaves_weights=True), directory
    remedy = "give a directory that has its config.json: --bundle DIR"
    definition = definition_of(str(place), remedy=remedy)
    require_consent(definition)
    return definition.bundle, definition.directory


def _call_as_saved(file: Path, directory: Path, *, trust_remote_code: bool) -> None:
    """Give every tensor the name that `from_pretrained` looks for."""
    saved_names = _saved_names()
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        head = json.loads(opened.read(size))
        said = {key: v for key, v in head.pop("__metadata__").items() if key != UNKNOWN}
        names = saved_names(directory, head.keys(), trust_remote_code=trust_remote_code)
        renamed = {names[name]: entry for name, entry in head.items()}
        text = json.dumps({"__metadata__": said, **renamed}, separators=(",", ":"))
        # Shorter than before, since what a run needs is left out: the rest stays put.
        opened.seek(8)
        opened.write(text.encode().ljust(size))
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
    """Make a durable file that others may read, as people's own are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _draft_directory(out: Path) -> Iterator[Path]:
    """Give a directory that takes the name `out` when the block has ended well."""
    if out.exists():
        raise UsageError(f"{out} is there already. Remove it, or choose another name.")
    draft = out.with_name(f"{out.name}.{secrets.token_hex(4)}~")
    try:
        draft.mkdir()
        yield draft
        for folder in (draft, *(each for each in draft.rglob("*") if each.is_dir())):
            sync_directory(folder)
        draft.rename(out)
        sync_directory(out.absolute().parent)
    except OSError as exc:
        raise UsageError(
            f"{out} cannot be written: {exc.strerror or exc}. Choose another place."
        ) from exc
    finally:
        shutil.rmtree(draft, ignore_errors=True)


Read = Callable[[int], FragmentState]
Progress = Callable[[int, int], None]


def write_anchor(
    observing: Observing, file: Path, *, round: int | None, progress: Progress | None
) -> int:
    """Write the newest anchor into a file, or that of a round; return its bytes.

    One fragment is in memory at a time.

    Raises:
        Refused: the run has no weights yet, or the round is not kept.
        CorruptError: what is kept does not verify.
    """
    founded, layout = observing.reader.founded, observing.reader.view.layout
    if founded is None:
        raise Refused(
            "The run has no weights yet: its first island brings them. Ask again when "
            "one has joined."
        )
    read = _reader(observing, round)
    kept = founded.constants
    plan = FilePlan.of(
        founded.run, founded.model, fragments=len(layout), kept_constants=kept
    )
    objects = ConstantObjects(observing.reader.store, founded)
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
            place = plan.head_bytes + plan.offsets[constant.name][0]
            for part in verified(constant, objects.parts(constant)):
                place += os.pwrite(handle, part, place)
        os.truncate(handle, plan.size_bytes)
        os.pwrite(handle, plan.head(rounds), 0)
    finally:
        os.close(handle)
    return plan.size_bytes


def _reader(observing: Observing, round: int | None) -> Read:
    if round is None:
        return observing.states.read
    past = BucketHistory(observing.reader, observing.outcomes)
    kept = past.rounds()
    if round not in kept:
        raise Refused(
            f"The anchor of round {round} is not kept: {listed_rounds(kept)} can be "
            "had. Leave the round out to take the newest of each fragment."
        )
    return lambda fragment: past.state(fragment, round)
