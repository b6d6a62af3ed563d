"""`atoll export --format hf`: a directory that `from_pretrained` loads."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.bundle import Bundle
from atoll.bundle.definition import CONFIG, MANIFEST
from atoll.cli.names import StoreUrl
from atoll.disk import sync_directory
from atoll.errors import UsageError
from atoll.island.model_definition import definition_of, require_consent
from atoll.security import RunUrl

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
    with _draft(out) as draft:
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
def _draft(out: Path) -> Iterator[Path]:
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
