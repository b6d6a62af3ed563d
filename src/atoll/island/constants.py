"""The constants that a run keeps, by name, a range at a time, for who builds a model.

They never change, so that no round that ends meanwhile disturbs who reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from atoll.clock import SystemClock
from atoll.exchange import MemoryRun
from atoll.exchange.constants import PART_BYTES, another
from atoll.exchange.forms.constants import parse_catalogue
from atoll.exchange.forms.heads import PROTOCOL, PROTOCOL_HEADER
from atoll.exchange.forms.routes import target_of
from atoll.http import Caller
from atoll.island.anchors import RemoteFile, Weights, refusal
from atoll.island.environment import (
    run_from_environment,
    surroundings_from_environment,
)
from atoll.protocol import TensorSpec
from atoll.protocol.constants import DTYPES, Catalogue, bytes_of
from atoll.wire import blake3_digest
from atoll.wire.digests import Bytes, view_of

Read = Callable[[TensorSpec, int, int], Bytes]
"""Gives some bytes of a constant."""


class ConstantWeights:
    """Constants that come a range at a time. Implements `Weights`."""

    def __init__(self, catalogue: Catalogue, read: Read) -> None:
        self._read = read
        self._there = {each.name: each for each in catalogue.there}
        self.shapes = {each.name: each.shape for each in catalogue.there}

    def read(self, name: str, first: int, last: int) -> tuple[str, np.ndarray]:
        """Return the dtype, and the bytes, of some elements of a constant.

        Raises:
            CorruptError: all were asked for, and do not have the constant's digest.
                Of a part only `join` finds that out.
        """
        constant = self._there[name]
        width = DTYPES[constant.dtype][1]
        data = np.frombuffer(
            view_of(self._read(constant, width * first, width * last)), np.uint8
        )
        is_whole = len(data) == bytes_of(constant)
        if is_whole and blake3_digest(data).hex() != constant.digest:
            raise another(constant)
        return constant.dtype, data


@contextmanager
def constants_of(run: MemoryRun | str | None) -> Iterator[Weights]:
    """Give the constants that a run keeps, without joining it.

    Raises what `weights_of` does.
    """
    run = run_from_environment() if run is None else run
    if isinstance(run, MemoryRun):
        kept = run.constants
        yield ConstantWeights(
            Catalogue.of(run.model, kept),
            lambda constant, first, last: kept[constant.digest][first:last],
        )
    elif run.startswith(("http://", "https://")):
        with _at_coordinator(run) as weights:
            yield weights
    else:
        with _in_store(run) as weights:
            yield weights


@contextmanager
def _at_coordinator(run: str) -> Iterator[Weights]:
    from atoll.island.reach import reach_to_look

    caller, headers, _ = reach_to_look(
        run, surroundings=surroundings_from_environment(), clock=SystemClock()
    )
    spoken = {**headers, PROTOCOL_HEADER: str(PROTOCOL)}
    try:
        yield ConstantWeights(_catalogue(caller, spoken), _reading(caller, spoken))
    finally:
        caller.close()


def _catalogue(caller: Caller, headers: Mapping[str, str]) -> Catalogue:
    reply = caller.call(
        "GET", target_of("constants"), headers=headers, is_repeatable=True
    )
    if reply.status != 200:
        raise refusal(reply)
    return parse_catalogue(reply.body)


def _reading(caller: Caller, headers: Mapping[str, str]) -> Read:
    def read(constant: TensorSpec, first: int, last: int) -> Bytes:
        file = RemoteFile(caller, headers, target_of("constant", constant.digest))
        data = np.empty(last - first, np.uint8)
        for begin in range(first, last, PART_BYTES):
            end = min(begin + PART_BYTES, last)
            data[begin - first : end - first] = file.bytes(begin, end)
        return data

    return read


@contextmanager
def _in_store(run: str) -> Iterator[Weights]:
    from atoll.exchange.bucket.constants import ConstantObjects
    from atoll.island.meeting import looking

    with looking(run, clock=SystemClock()) as (lookout, _):
        founded = lookout.founded
        assert founded is not None, "its weights have been read"
        objects = ConstantObjects(lookout.store, founded)
        catalogue = Catalogue.of(founded.model, founded.constants)
        yield ConstantWeights(catalogue, objects.read)
