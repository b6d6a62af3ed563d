"""`atoll inspect FILE`: print a frame, a document or a bundle, and verify it."""

from __future__ import annotations

import io
import json
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import typer

from atoll.bundle import MAX_BYTES, Bundle
from atoll.cli.terminal import console, echo, progress_bar, table
from atoll.errors import CorruptError, NoSuchObject, UsageError
from atoll.exchange.bucket import documents
from atoll.exchange.bucket.create import directory_of
from atoll.exchange.bucket.documents import parse
from atoll.store import open_store
from atoll.wire import unpack, unpack_roster
from atoll.wire.files import read_header, read_pieces
from atoll.wire.frame import pack, update_digest
from atoll.wire.header import Header
from atoll.wire.roster import Roster, RosterEntry

PROGRESS_FROM_BYTES = 2**26
"""Below this a body is verified before a bar could be read."""

BLOCK_BYTES = 512
"""Of a tar file; the first one says that it is one."""

ROSTER_COLUMNS = (
    "island",
    "incarnation",
    "verdict",
    "weight",
    "inner steps",
    "tokens",
    "digest",
)

Facts = dict[str, object]


def inspect(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Frame, bundle or object of a run in a store; or its URL.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the header of a frame, and verify its body piece by piece.

    Exits with 0 when the frame is verified, 2 when the file cannot be read, 5 when
    the frame is corrupt. Also prints a document of a run in a store, and the files of
    a bundle or of a directory that would be one.
    """
    if "://" not in file and Path(file).is_dir():
        _inspect_bundle(Bundle.of_directory(file), as_json=as_json)
        return
    with _open(file) as opened:
        if opened.peek(BLOCK_BYTES)[257:262] == b"ustar":
            data = opened.read(MAX_BYTES + 1)
            _inspect_bundle(Bundle.of_archive(data, digest=None), as_json=as_json)
        elif opened.peek(1)[:1] == b"{":
            _inspect_document(opened.read(), as_json=as_json)
        elif as_json:
            _inspect_as_json(opened)
        else:
            _inspect_as_text(opened)


@contextmanager
def _open(path: str) -> Iterator[BufferedReader[Any]]:
    if "://" in path:
        with BufferedReader(open_object(path)) as opened:  # closes the raw file too
            yield opened
        return
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as exc:
        raise UsageError(
            f"cannot read {path}: {exc.strerror}. Give the path of a frame."
        ) from exc


def _inspect_bundle(bundle: Bundle, *, as_json: bool) -> None:
    code = set(bundle.code)
    if as_json:
        files = {name: len(content) for name, content in bundle.files.items()}
        facts = {
            "kind": "bundle",
            "digest": bundle.digest,
            "bytes": len(bundle.data),
            "factory": bundle.factory,
            "code": sorted(code),
            "files": files,
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    echo((f"bundle {bundle.digest}", "bold"))
    typer.echo(f"  {len(bundle.files)} files, {len(bundle.data)} bytes")
    if bundle.factory is not None:
        typer.echo(f"  made by {bundle.factory}")
    for name, content in sorted(bundle.files.items()):
        mark = "code" if name in code else ""
        typer.echo(f"  {len(content):>10}  {mark:<4}  {name}")


def _inspect_document(data: bytes, *, as_json: bool) -> None:
    facts, roster = document_facts(data)
    if as_json:
        entries = (
            {"roster": [_entry_facts(e) for e in roster.entries]} if roster else {}
        )
        typer.echo(json.dumps(facts | entries, indent=2))
        return
    echo((f"{facts.pop('kind')} document", "bold"))
    for name, value in facts.items():
        shown = value if isinstance(value, str) else json.dumps(value)
        typer.echo(f"  {name:<12} {shown}")
    if roster is not None:
        _print_roster(roster)


def _inspect_as_text(file: BinaryIO) -> None:
    header = read_header(file)
    echo((header.name, "bold"))
    for name, value in _text_facts(header):
        typer.echo(f"  {name:<12} {value}")
    if header.roster is not None:
        _print_roster(header.roster)
    _verify(file, header)
    echo((f"verified: {header.body_bytes} bytes of body in {_pieces(header)}", "green"))


def _inspect_as_json(file: BinaryIO) -> None:
    facts: Facts = {"verified": False}
    try:
        header = read_header(file)
        facts |= _json_facts(header)
        _verify(file, header)
        facts["verified"] = True
    except CorruptError as exc:
        facts["problem"] = str(exc)
        raise
    finally:
        typer.echo(json.dumps(facts, indent=2))


def _verify(file: BinaryIO, header: Header) -> None:
    pieces = read_pieces(file, header)
    if header.body_bytes < PROGRESS_FROM_BYTES:
        deque(pieces, maxlen=0)
        return
    with progress_bar("verifying") as progress:
        done = 0
        for piece in pieces:
            done += len(piece)
            progress(done, header.body_bytes)


def _text_facts(header: Header) -> Iterator[tuple[str, str]]:
    yield "run", header.run
    yield "fragment", str(header.fragment)
    yield "round", str(header.round)
    if header.island:
        yield "island", f"{header.island}, incarnation {header.incarnation}"
    yield "epoch", str(header.epoch)
    yield "base", header.base.hex()
    yield "codec", f"{header.codec}, seed {header.seed}"
    if header.gathered:
        yield "gathered", f"{header.num_bodies} updates, merge {header.gathered}"
    yield "elements", str(header.elements)
    yield "bytes", f"{len(pack(header))} header, {header.body_bytes} body"
    yield "norm", repr(header.norm)
    yield "weight", str(header.weight)
    if header.kind.is_update:
        progress = header.progress
        yield (
            "progress",
            f"{progress.inner_steps} inner steps, {progress.tokens} tokens, "
            f"{len(progress.cursor)} bytes of cursor",
        )
        yield "digest", update_digest(header).hex()
    if header.refused:
        yield "refused", header.refused
    if outer := header.outer:
        # As fp32 they print the way they were set: 0.7, not 0.699999988079071.
        lr, momentum = str(np.float32(outer.lr)), str(np.float32(outer.momentum))
        yield (
            "outer",
            f"{outer.optimizer}, lr {lr}, momentum {momentum}, count {outer.count}",
        )
        if outer.buffer:
            share = np.float32(outer.share)
            yield "share", f"{share} of the mean, buffer {outer.buffer}"


def _pieces(header: Header) -> str:
    return "1 piece" if len(header.pieces) == 1 else f"{len(header.pieces)} pieces"


def _print_roster(roster: Roster) -> None:
    rows: list[tuple[str, ...]] = [ROSTER_COLUMNS, *map(_row, roster.entries)]
    if any(entry.age for entry in roster.entries):
        ages = ["age", *[str(entry.age) for entry in roster.entries]]
        rows = [(*row, age) for row, age in zip(rows, ages, strict=True)]
    typer.echo(f"  roster of {len(roster.entries)}")
    from rich.padding import Padding

    console(sys.stdout).print(Padding.indent(table(rows), 4))


def _row(entry: RosterEntry) -> tuple[str, ...]:
    verdict = f"{entry.verdict}: {entry.reason}" if entry.reason else entry.verdict
    return (
        entry.island,
        str(entry.incarnation),
        verdict,
        str(entry.weight),
        str(entry.inner_steps),
        str(entry.tokens),
        entry.digest.hex()[:16] or "-",
    )


def _json_facts(header: Header) -> Facts:
    facts: Facts = {
        "kind": header.kind.name.lower(),
        "run": header.run,
        "fragment": header.fragment,
        "round": header.round,
        "island": header.island,
        "incarnation": header.incarnation,
        "epoch": header.epoch,
        "base": header.base.hex(),
        "codec": header.codec,
        "seed": header.seed,
        "elements": header.elements,
        "header_bytes": len(pack(header)),
        "body_bytes": header.body_bytes,
        "weight": header.weight,
        "norm": header.norm,
        "inner_steps": header.progress.inner_steps,
        "tokens": header.progress.tokens,
        "cursor": header.progress.cursor.hex(),
        "refused": header.refused,
        "pieces": [piece.hex() for piece in header.pieces],
    }
    if header.gathered:
        facts["gathered"] = header.gathered
    if header.kind.is_update:
        facts["digest"] = update_digest(header).hex()
    if header.outer is not None:
        facts["outer"] = vars(header.outer)
    if header.roster is not None:
        facts["roster"] = [_entry_facts(entry) for entry in header.roster.entries]
    return facts


def _entry_facts(entry: RosterEntry) -> Facts:
    return {**vars(entry), "digest": entry.digest.hex(), "spans": entry.spans.hex()}


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
"""Fields that are not printed: digests that identify a member."""


def open_object(url: str) -> io.BytesIO | io.FileIO:
    """Open the object at a URL for reading.

    Raises:
        UsageError: the object does not exist, or the URL is wrong.
        StoreDenied: reading is not allowed.
        Unreachable: the store does not answer.
    """
    path = directory_of(url)
    store_url, _, key = url.rpartition("/")
    try:
        # Opening a store in a directory would create the directory.
        return io.FileIO(path) if path else io.BytesIO(open_store(store_url).get(key))
    except (FileNotFoundError, NoSuchObject) as exc:
        raise UsageError(f"There is no object at {url}.") from exc


def document_facts(data: bytes) -> tuple[dict[str, Any], Roster | None]:
    """Return the fields of a document, and its roster if it has one.

    Raises:
        CorruptError: it is no document of a run.
    """
    kind, envelope = _kind(data), json.loads(data)
    document: dict[str, Any] = dict(envelope["document"])
    for name in SECRET:
        document.pop(name, None)
    roster = None
    if kind == "roster":
        roster = unpack_roster(bytes.fromhex(document.pop("roster")))
    if kind == "state":
        document["head"] = unpack(bytes.fromhex(document["head"])).name
    # An object's key and a member's secret key have the same name.
    sealed = {name: envelope[name] for name in ("key", "digest") if name in envelope}
    return {"kind": kind, **sealed, **document}, roster


def _kind(data: bytes) -> str:
    reason = ""
    for kind, document_type in KINDS.items():
        try:
            parse(document_type, data, key="the object", is_placed=False)
        except CorruptError as exc:
            reason = reason or f"as {kind}: {exc.__cause__ or exc}"
        else:
            return kind
    raise CorruptError(f"This is no document of a run. {reason}")
