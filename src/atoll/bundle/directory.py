"""A bundle's files on disk, in a directory named by the digest, and its code.

Rule 1: a directory with its final name is complete: it is written under another name,
        made durable, and renamed. It is compared before each use.
Rule 2: several processes may stage at the same time: one of them is first, and all use
        its files.

Code of a bundle is loaded as a package whose modules have the bundle's digest in their
names, and find each other by relative imports. `sys.path` is not changed, so that no
file of a bundle replaces another module.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll.bundle.definition import Bundle
from atoll.disk import sync_directory
from atoll.disk.system import write_whole
from atoll.errors import DiskError, UsageError


def staged(root: Path, digest: str) -> Bundle | None:
    """Return the bundle staged under a digest; None: it is missing or damaged.

    A file that was edited makes it another bundle, which is not returned.
    """
    directory = root / digest
    if not directory.is_dir():
        return None
    try:
        bundle = Bundle.of_directory(directory)
    except (UsageError, OSError):
        return None
    return bundle if bundle.digest == digest else None


def stage(bundle: Bundle, root: Path) -> Path:
    """Write a bundle's files to a separate directory, and return it.

    A complete directory is used again; one that was edited is replaced.

    Raises:
        DiskError: the disk failed; then no directory has that name.
    """
    target = root / bundle.digest
    if staged(root, bundle.digest) is not None:
        return target
    with _translated(target):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _draft(root, bundle) as draft:
            _put_in_place(draft, root, bundle.digest)
        sync_directory(root)
    return target


@contextmanager
def _draft(root: Path, bundle: Bundle) -> Iterator[Path]:
    """Yield a complete and durable directory under a temporary name."""
    draft = root / f".{bundle.digest}.{secrets.token_hex(8)}"
    try:
        draft.mkdir(mode=0o700)
        folders = {draft}
        for name, content in bundle.files.items():
            path = draft / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folders.update(above for above in path.parents if draft in above.parents)
            write_whole(path, [content])
        for folder in folders:
            sync_directory(folder)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _put_in_place(draft: Path, root: Path, digest: str) -> None:
    while True:
        try:
            os.rename(draft, root / digest)
            return
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if staged(root, digest) is not None:
            return  # another process was first
        aside = draft.with_name(f"{draft.name}.spoilt")
        with suppress(FileNotFoundError):  # another process does the same
            os.rename(root / digest, aside)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise DiskError(
            f"{path} cannot be written: {reason}. Free some space there, or choose "
            "another directory with XDG_CACHE_HOME."
        ) from exc


def load_factory(directory: Path, digest: str, factory: str) -> Callable[[], Any]:
    """Return the function MODULE:FUNCTION. The caller has checked that it may run.

    Raises:
        UsageError: there is none, or its module cannot be imported.
    """
    package = _package(directory, f"atoll_bundle_{digest[:16]}")
    module, _, function = factory.partition(":")
    try:
        loaded = importlib.import_module(f"{package}.{module}")
    except ImportError as exc:
        raise UsageError(
            f"{module} of the bundle cannot be imported: {exc}. Files of a bundle "
            "import each other by a dot (from .layers import Block), and all else has "
            "to be installed here."
        ) from exc
    make_model = vars(loaded).get(function)
    if not callable(make_model):
        raise UsageError(
            f"{module} of the bundle has no function {function!r}, which its "
            "bundle.toml names. Name one that it has, and begin a run with that."
        )
    return make_model  # type: ignore[no-any-return]


def _package(directory: Path, name: str) -> str:
    """Register a package of that name whose modules are in a directory."""
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(directory)]
        sys.modules[name] = package
    return name
