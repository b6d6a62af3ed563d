"""Reads weights and constants of a run by name, range by range, without joining it.

A caller that builds an empty model reads only its own part: a stage of a pipeline its
own tensors, a rank its own rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np

from atoll.errors import CorruptError, Refused, Unreachable, UsageError
from atoll.exchange import MemoryRun
from atoll.exchange.api import Incoming
from atoll.exchange.api.replies import parse_catalogue, read_failure
from atoll.exchange.api.request_head import PROTOCOL, PROTOCOL_HEADER
from atoll.exchange.base import PART_BYTES, digest_error
from atoll.http import BUSY, HttpClient, HttpReply
from atoll.island.environment import credentials_from_environment, run_from_environment
from atoll.island.resume import fetch_state
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.model import DTYPES, ConstantCatalogue, bytes_of
from atoll.retry import BUSY_FILE, retried
from atoll.routes import ROUTE
from atoll.runtime import SystemClock, SystemRuntime
from atoll.safetensors import read_header
from atoll.settings import RunSettings
from atoll.weights import FragmentState, lay_out
from atoll.wire import blake3_digest
from atoll.wire.digests import Bytes, view_of

FILE_S = 600.0
"""Timeout of a read: the coordinator may write the file first."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class RunWeights(Protocol):
    """The weights or constants of a run, by the names of its model."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, first: int, last: int) -> tuple[str, np.ndarray]:
        """Return the dtype, and the bytes, of some elements of a tensor."""
        ...


class AnchorChanged(Exception):
    """A round has ended meanwhile: earlier reads are of another anchor."""


class FragmentWeights:
    """Weights that are fetched fragment by fragment. Implements `RunWeights`.

    The last fragment is cached, so that reads in the order of `shapes` fetch each
    fragment once.
    """

    def __init__(
        self,
        model: ModelSpec,
        settings: RunSettings,
        fetch: Callable[[int], FragmentState],
    ) -> None:
        self._layout, self._fetch = lay_out(model, settings), fetch
        self._offsets = {
            tensor.name: (index, offset)
            for index, fragment in enumerate(self._layout)
            for tensor, offset in zip(fragment.tensors, fragment.offsets, strict=False)
        }
        self.shapes = {
            tensor.name: tensor.shape
            for fragment in self._layout
            for tensor in fragment.tensors
        }
        self._cached: tuple[int, FragmentState] | None = None

    def read(self, name: str, first: int, last: int) -> tuple[str, np.ndarray]:
        index, offset = self._offsets[name]
        if self._cached is None or self._cached[0] != index:
            self._cached = None  # freed before the next one is fetched
            self._cached = (index, self._fetch(index))
        anchor = self._cached[1].anchor
        return "float32", anchor[offset + first : offset + last].view(np.uint8)


class RemoteFile:
    """A file that a coordinator serves, read range by range."""

    def __init__(
        self, caller: HttpClient, headers: Mapping[str, str], target: str
    ) -> None:
        self._caller, self._headers, self._target = caller, dict(headers), target
        self._etag = ""

    def bytes(self, begin: int, end: int) -> np.ndarray:
        """Return a part of the file.

        Raises:
            AnchorChanged: the file has changed since the last read.
            Unreachable: the coordinator stays busy.
        """
        if begin == end:
            return np.empty(0, np.uint8)
        return retried(
            partial(self._ask, begin, end), BUSY_FILE, sleep=SystemRuntime().sleep
        )

    def _ask(self, begin: int, end: int) -> np.ndarray:
        reply = self._caller.call(
            "GET",
            self._target,
            headers={**self._headers, "Range": f"bytes={begin}-{end - 1}"},
            timeout_s=FILE_S,
            is_repeatable=True,
        )
        if reply.status in BUSY:
            raise Unreachable(
                f"The coordinator is busy, and did not send {self._target}. Try again "
                "later."
            )
        if reply.status == 206:
            etag = reply.headers.get("etag", "")
            if self._etag and etag != self._etag:
                raise AnchorChanged
            self._etag = etag
            return self._whole(np.frombuffer(reply.body, np.uint8), end - begin)
        raise refusal(reply)

    def _whole(self, part: np.ndarray, size: int) -> np.ndarray:
        if part.size != size:
            raise CorruptError(
                f"{size} bytes of {self._target} were requested, and {part.size} came. "
                "A proxy answers in the coordinator's place."
            )
        return part


def refusal(reply: HttpReply) -> Exception:
    """Return the error of a reply without the requested content."""
    if reply.status < 400:
        return Refused(f"The coordinator answers {reply.status}.")
    kind = reply.headers.get("content-type", "")
    return read_failure(reply.status, kind, Incoming.of(bytes(reply.body)))


class AnchorWeights:
    """The anchor that a coordinator serves as a file. Implements `RunWeights`."""

    def __init__(self, caller: HttpClient, headers: Mapping[str, str]) -> None:
        self._file = RemoteFile(caller, headers, "/anchor")
        header = read_header(
            lambda first, last: self._file.bytes(first, last).tobytes(),
            source="The anchor",
        )
        model = json.loads(header.metadata["atoll.model"])
        # Constants are read from their own route: no round changes that file.
        constants = {name for name, _, _, role, _ in model if role == "constant"}
        self._begin = header.size_bytes
        self._entries = {
            name: entry
            for name, entry in header.arrays.items()
            if name not in constants
        }
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str, first: int, last: int) -> tuple[str, np.ndarray]:
        entry = self._entries[name]
        dtype = _DTYPES[entry.kind]
        begin = self._begin + entry.first
        size = BYTES[dtype]
        return dtype, self._file.bytes(begin + size * first, begin + size * last)


@contextmanager
def weights_of(run: MemoryRun | str | None) -> Iterator[RunWeights]:
    """Give the weights of a run, without joining it.

    Raises:
        UsageError: the run has no weights yet, or there is no such run.
        RemoteError: it does not answer, or refuses.
    """
    run = run_from_environment() if run is None else run
    if isinstance(run, MemoryRun):
        model = run.model
        if model is None:
            raise _empty(run.id)
        memory_run = run
        yield FragmentWeights(
            model, memory_run.settings, lambda index: fetch_state(memory_run, index)
        )
    elif run.startswith(("http://", "https://")):
        with _at_coordinator(run) as weights:
            yield weights
    elif run in ("", "none"):
        raise UsageError(
            f"run={run!r} has no weights. Give a source= or a checkpoint=."
        )
    else:
        with _in_store(run) as weights:
            yield weights


def _empty(run: str) -> UsageError:
    return UsageError(
        f"The run {run!r} has no weights yet, and a model that is built empty cannot "
        "found it. Found it with `atoll serve --init FILE`, or with an island that "
        "initialises its own model."
    )


@contextmanager
def _at_coordinator(run: str) -> Iterator[RunWeights]:
    from atoll.island.connection import connect_read_only

    caller, headers, info = connect_read_only(
        run, paths=credentials_from_environment(), clock=SystemClock()
    )
    try:
        if not info.model_fingerprint:
            raise _empty(info.run)
        yield AnchorWeights(caller, headers)
    finally:
        caller.close()


@contextmanager
def _in_store(run: str) -> Iterator[RunWeights]:
    from atoll.island.store_connection import open_read_only

    with open_read_only(run, clock=SystemClock()) as (reader, states):
        if reader.founded is None:
            raise _empty(run)
        model, settings = reader.founded.model, reader.view.settings
        yield FragmentWeights(model, settings, states.read)


Read = Callable[[TensorSpec, int, int], Bytes]
"""Returns a range of the bytes of a constant."""


class ConstantWeights:
    """Constants that are fetched range by range. Implements `RunWeights`."""

    def __init__(self, catalogue: ConstantCatalogue, read: Read) -> None:
        self._read = read
        self._constants = {constant.name: constant for constant in catalogue.there}
        self.shapes = {constant.name: constant.shape for constant in catalogue.there}

    def read(self, name: str, first: int, last: int) -> tuple[str, np.ndarray]:
        """Return the dtype, and the bytes, of some elements of a constant.

        Raises:
            CorruptError: the whole constant was read, and its digest does not match.
                For a part, only `join` detects that.
        """
        constant = self._constants[name]
        width = DTYPES[constant.dtype][1]
        data = np.frombuffer(
            view_of(self._read(constant, width * first, width * last)), np.uint8
        )
        is_whole = len(data) == bytes_of(constant)
        if is_whole and blake3_digest(data).hex() != constant.digest:
            raise digest_error(constant)
        return constant.dtype, data


@contextmanager
def constants_of(run: MemoryRun | str | None) -> Iterator[RunWeights]:
    """Give the constants that a run keeps, without joining it.

    Raises what `weights_of` does.
    """
    run = run_from_environment() if run is None else run
    if isinstance(run, MemoryRun):
        constants = run.constants
        yield ConstantWeights(
            ConstantCatalogue.of(run.model, constants),
            lambda constant, first, last: constants[constant.digest][first:last],
        )
    elif run.startswith(("http://", "https://")):
        with _constants_at_coordinator(run) as weights:
            yield weights
    else:
        with _constants_in_store(run) as weights:
            yield weights


@contextmanager
def _constants_at_coordinator(run: str) -> Iterator[RunWeights]:
    from atoll.island.connection import connect_read_only

    caller, headers, _ = connect_read_only(
        run, paths=credentials_from_environment(), clock=SystemClock()
    )
    headers = {**headers, PROTOCOL_HEADER: str(PROTOCOL)}
    try:
        yield ConstantWeights(_catalogue(caller, headers), _reading(caller, headers))
    finally:
        caller.close()


def _catalogue(caller: HttpClient, headers: Mapping[str, str]) -> ConstantCatalogue:
    reply = caller.call(
        "GET", ROUTE["constants"].target(), headers=headers, is_repeatable=True
    )
    if reply.status != 200:
        raise refusal(reply)
    return parse_catalogue(reply.body)


def _reading(caller: HttpClient, headers: Mapping[str, str]) -> Read:
    def read(constant: TensorSpec, first: int, last: int) -> Bytes:
        file = RemoteFile(caller, headers, ROUTE["constant"].target(constant.digest))
        data = np.empty(last - first, np.uint8)
        for begin in range(first, last, PART_BYTES):
            end = min(begin + PART_BYTES, last)
            data[begin - first : end - first] = file.bytes(begin, end)
        return data

    return read


@contextmanager
def _constants_in_store(run: str) -> Iterator[RunWeights]:
    from atoll.exchange.bucket.large_objects import ConstantObjects
    from atoll.island.store_connection import open_read_only

    with open_read_only(run, clock=SystemClock()) as (reader, _):
        founded = reader.founded
        assert founded is not None, "its weights have been read"
        objects = ConstantObjects(reader.store, founded)
        catalogue = ConstantCatalogue.of(founded.model, founded.constants)
        yield ConstantWeights(catalogue, objects.read)
