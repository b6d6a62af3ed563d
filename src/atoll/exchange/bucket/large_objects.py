"""The large objects of a run in a bucket: states and constants, in bounded parts.

A state is complete when its last object, a document, exists. Constants belong to a
founding, and its document names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from atoll.errors import CorruptError, NoSuchObject
from atoll.exchange.base import PART_BYTES, Frame, verified
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import RESTORE, RunDocument, StateDocument, fetch
from atoll.exchange.bucket.reader import BucketReader
from atoll.protocol import TensorSpec
from atoll.protocol.model import bytes_of, keepable
from atoll.runtime import Runtime
from atoll.store import Data, Store
from atoll.weights import require_state
from atoll.wire import Header, blake3_digest, header_length, unpack
from atoll.wire.digests import Blake3Hasher, Bytes

STATE_PART_BYTES = 64 * 2**20


class StateObjects:
    """Finds and reads the states of a run; puts nothing."""

    def __init__(self, reader: BucketReader) -> None:
        self._reader = reader
        self._store, self._runtime = reader.store, reader.runtime

    def rounds(self, fragment: int, *, is_complete: bool = True) -> set[int]:
        """Return the rounds whose states are listed as complete, or at all."""
        prefix, rounds = keys.states(fragment), set()
        for item in self._store.items(prefix):
            round, _, part = item.key.removeprefix(prefix).partition("/")
            is_requested = part == "complete" or not is_complete
            if is_requested and round.isascii() and round.isdecimal():
                rounds.add(int(round))
        return rounds

    def complete(self, fragment: int) -> Iterator[StateDocument]:
        """Yield the documents of complete states, the latest first.

        A foreign object is ignored: the run can continue without it.
        """
        for round in sorted(self.rounds(fragment), reverse=True):
            key = keys.state_complete(fragment, round)
            try:
                yield self.document(fragment, round)
            except NoSuchObject:
                continue
            except CorruptError as exc:
                self._reader.warn_once(f"{key} is ignored: {exc}")

    def document(self, fragment: int, round: int) -> StateDocument:
        """Return the document of the complete state of a round.

        Raises:
            NoSuchObject: there is none, or it was collected.
            CorruptError: the object is a foreign one.
        """
        key = keys.state_complete(fragment, round)
        document = fetch(self._store, documents.STATE, key, run=self._reader.run)
        if (document.fragment, document.round) != (fragment, round):
            raise CorruptError(
                f"It says round {document.round} of fragment {document.fragment}. "
                f"{RESTORE}"
            )
        return document

    def read(self, document: StateDocument) -> tuple[Header, np.ndarray]:
        """Return the frame of a state, whose body is not verified yet.

        Raises:
            NoSuchObject: a part is gone.
            CorruptError, Refused: it cannot be a state of this run.
        """
        header = self._head(document)
        # Exact sizes: a range behind the end costs another request.
        sizes = [
            min(STATE_PART_BYTES, header.body_bytes - first)
            for first in range(0, document.parts * STATE_PART_BYTES, STATE_PART_BYTES)
        ]
        reads = [
            partial(
                self._store.get,
                keys.state_part(document.fragment, document.round, part),
                0,
                size,
            )
            for part, size in enumerate(sizes)
        ]
        body = bytearray().join(self._runtime.gather(reads))
        return header, np.frombuffer(body, np.uint8)

    def _head(self, document: StateDocument) -> Header:
        header = unpack(document.head)
        named = (header.run, header.fragment, header.round)
        if named != (document.run, document.fragment, document.round):
            raise CorruptError(
                f"{keys.state_complete(document.fragment, document.round)} holds the "
                f"{header.name}. {RESTORE}"
            )
        self._require(header, round=header.round)
        if document.parts != max(1, -(-header.body_bytes // STATE_PART_BYTES)):
            raise CorruptError(
                f"{document.parts} parts cannot hold {header.body_bytes} bytes. "
                f"{RESTORE}"
            )
        return header

    def _require(self, header: Header, *, round: int) -> None:
        view = self._reader.view
        layout, terms = view.layout[header.fragment], view.terms(header.fragment)
        if header.outer and header.outer.optimizer == terms.outer.optimizer:
            # A later epoch may have changed the other values.
            header = replace(header, outer=terms.outer)
        require_state(header, layout, terms, round=round)

    def name(self, fragment: int, round: int, parts: int = 1) -> str:
        """Return the keys of a state's objects, for a message."""
        if not round:
            return self.founding_key(fragment)
        last = f" to {parts - 1}" if parts > 1 else ""
        part = keys.state_part(fragment, round, 0)
        return f"{keys.state_complete(fragment, round)} with {part}{last}"

    def founding_key(self, fragment: int) -> str:
        """Return the key of the first state of a fragment."""
        founded = self._reader.founded
        assert founded is not None
        return keys.founding(founded.founding, fragment)

    def founding(self, fragment: int) -> tuple[Header, np.ndarray]:
        """Return the frame of a fragment's first state, whose body is not verified yet.

        Raises:
            NoSuchObject: it is gone.
            CorruptError, Refused: it is none, or that of another run or fragment.
        """
        data = self._store.get(self.founding_key(fragment))
        length = header_length(data)
        header = unpack(data[:length])
        founded = self._reader.founded
        states = founded.states if founded is not None else ()
        named = states[fragment] if fragment < len(states) else b""
        if named and blake3_digest(data[:length]) != named:
            raise CorruptError(f"It is another {header.name} than {keys.RUN} names.")
        if (header.run, header.fragment) != (self._reader.run, fragment):
            raise CorruptError(f"It is the {header.name} of run {header.run!r}.")
        self._require(header, round=0)
        return header, np.frombuffer(bytearray(data[length:]), np.uint8)


def put_parts(
    put: Callable[[str, Sequence[Data]], object], runtime: Runtime, frame: Frame
) -> int:
    """Put the body of a state, part by part; return how many there are."""
    header, body = frame.header, memoryview(frame.body.data)
    parts = [
        body[first : first + STATE_PART_BYTES]
        for first in range(0, max(1, len(body)), STATE_PART_BYTES)
    ]
    runtime.gather(
        [
            partial(put, keys.state_part(header.fragment, header.round, number), [part])
            for number, part in enumerate(parts)
        ]
    )
    return len(parts)


def anonymous(header: Header) -> Header:
    """Return the header of a state without the island that wrote it."""
    return Header(
        kind=header.kind,
        run=header.run,
        fragment=header.fragment,
        round=header.round,
        base=header.base,
        codec=header.codec,
        elements=header.elements,
        weight=header.weight,
        outer=header.outer,
    ).sealed(body_bytes=header.body_bytes, pieces=header.pieces)


OBJECT_BYTES = 4 * PART_BYTES
"""Size of every object of a constant except the last."""


def put_constant(
    put: Callable[[str, Sequence[Data]], object],
    nonce: str,
    constant: TensorSpec,
    parts: Iterable[Bytes],
) -> None:
    """Put a constant for the founding of that nonce. Safe to repeat.

    Raises:
        CorruptError: the parts do not have its digest; no document may name it.
    """
    for number, views in enumerate(_objects(verified(constant, parts))):
        put(keys.constant_part(nonce, constant.digest, number), views)


def _objects(parts: Iterator[memoryview]) -> Iterator[list[Data]]:
    """Yield the parts grouped into objects of `OBJECT_BYTES`."""
    views: list[Data] = []
    free_bytes = OBJECT_BYTES
    for part in parts:
        while part:
            views.append(part[:free_bytes])
            part, free_bytes = part[free_bytes:], free_bytes - len(views[-1])
            if not free_bytes:
                yield views
                views, free_bytes = [], OBJECT_BYTES
    if views:
        yield views


def constants_of(document: RunDocument) -> tuple[TensorSpec, ...]:
    """Return the constants that a run in a bucket keeps.

    Raises:
        CorruptError: the document names one that the model does not have.
    """
    constants = keepable(document.model)
    if unknown := set(document.constants) - constants.keys():
        raise CorruptError(
            f"{keys.RUN} names the constant {min(unknown)[:12]}, and the model has "
            "none like it. The writer of that object has to correct it."
        )
    return tuple(constants[digest] for digest in document.constants)


class ConstantObjects:
    """Reads the constants of a run. Implements `Constants`."""

    def __init__(self, store: Store, document: RunDocument) -> None:
        self._store, self._nonce = store, document.founding

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        size, digesting, is_whole = bytes_of(constant), Blake3Hasher(), first == 0
        while first < size:
            last = min(first + PART_BYTES, size)
            part = self.read(constant, first, last)
            digesting.add(part)
            yield part
            first = last
        if is_whole and digesting.digest.hex() != constant.digest:
            key = keys.constant_part(self._nonce, constant.digest, 0)
            raise CorruptError(
                f"{constant.name!r}, which is {key} and the objects after it, does not "
                f"have the digest in its name. {RESTORE}"
            )

    def read(self, constant: TensorSpec, first: int, last: int) -> bytearray:
        """Return some bytes of a constant.

        Raises:
            CorruptError: they no longer exist.
        """
        data = bytearray()
        while first + len(data) < last:
            number, offset = divmod(first + len(data), OBJECT_BYTES)
            size = min(OBJECT_BYTES - offset, last - first - len(data))
            data += self._get(constant, number, offset, size)
        return data

    def _get(
        self, constant: TensorSpec, number: int, offset: int, size: int
    ) -> memoryview:
        key = keys.constant_part(self._nonce, constant.digest, number)
        try:
            data = self._store.get(key, offset, size)
        except NoSuchObject:
            data = memoryview(b"")
        if not data:
            raise CorruptError(
                f"{key} is gone, or shorter than it was: {constant.name!r} cannot be "
                "read. Give its values with source=."
            )
        return data
