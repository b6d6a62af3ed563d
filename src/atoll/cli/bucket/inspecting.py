"""What an object of a run in a store says, if it is a document and no frame."""

from __future__ import annotations

import io
import json
from typing import Any

from atoll.errors import CorruptError, NoSuchObject, UsageError
from atoll.exchange.bucket import documents
from atoll.exchange.bucket.create import directory_of
from atoll.exchange.bucket.documents import parse
from atoll.store import open_store
from atoll.wire import Roster, unpack, unpack_roster

KINDS: dict[str, Any] = {
    "settings": documents.SETTINGS,
    "run": documents.RUN,
    "roster": documents.ROSTER,
    "state": documents.STATE,
    "member": documents.MEMBER,
    "control": documents.CONTROL,
    "slot": documents.SLOT,
}

SECRET = ("key", "nonce")
"""Digests by which a member is known; of no use to who looks."""


def fetched(url: str) -> io.BytesIO | io.FileIO:
    """Return what reads the object at a URL.

    Raises:
        UsageError: there is none, or the URL is wrong.
        StoreDenied: reading is not allowed.
        Unreachable: the store does not answer.
    """
    path = directory_of(url)
    place, _, key = url.rpartition("/")
    try:
        # A store in a directory would be made there.
        return io.FileIO(path) if path else io.BytesIO(open_store(place).get(key))
    except (FileNotFoundError, NoSuchObject) as exc:
        raise UsageError(f"There is no object at {url}.") from exc


def facts_of(data: bytes) -> tuple[dict[str, Any], Roster | None]:
    """Return what a document says, and its roster if it has one.

    Raises:
        CorruptError: it is none of ours.
    """
    kind, whole = _kind(data), json.loads(data)
    said: dict[str, Any] = dict(whole["document"])
    for name in SECRET:
        said.pop(name, None)
    roster = None
    if kind == "roster":
        roster = unpack_roster(bytes.fromhex(said.pop("roster")))
    if kind == "state":
        said["head"] = unpack(bytes.fromhex(said["head"])).name
    # A key of an object, and that of a member, which is not shown, have one name.
    sealed = {name: whole[name] for name in ("key", "digest") if name in whole}
    return {"kind": kind, **sealed, **said}, roster


def _kind(data: bytes) -> str:
    reason = ""
    for kind, form in KINDS.items():
        try:
            parse(form, data, key="the object", is_placed=False)
        except CorruptError as exc:
            reason = reason or f"as {kind}: {exc.__cause__ or exc}"
        else:
            return kind
    raise CorruptError(f"This is no document of a run. {reason}")
