"""Every exchange keeps a founder's constants, or the run is not founded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from atoll import RunSettings
from atoll.coordinator import Service
from atoll.errors import CorruptError, UsageError
from atoll.exchange import CoordinatorExchange, MemoryRun
from atoll.exchange.base import PART_BYTES, FoundingExchange
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import RunDocument, fetch
from atoll.exchange.bucket.large_objects import (
    OBJECT_BYTES,
    ConstantObjects,
    put_constant,
)
from atoll.simulate import SimDisk
from atoll.store import MemoryStore
from atoll.testing.fixtures import enter, plain_settings
from tests.exchange.bucket.test_attacks import Beach
from tests.exchange.constant_samples import (
    BASE,
    MODEL,
    SPECS,
    TABLE,
    Held,
    begin,
    constant,
    found,
    settle,
)
from tests.exchange.test_contract import DirectLine

Kept = Callable[[], dict[str, bytes]]


@dataclass
class Place:
    """A run that has no founder yet, and what it keeps."""

    exchange: FoundingExchange
    kept: Kept


def in_memory(settings: RunSettings) -> Place:
    run = MemoryRun(settings)
    return Place(run, lambda: dict(run.constants))


def at_a_coordinator(settings: RunSettings) -> Place:
    service = Service.create(SimDisk(), settings, run="run", now_s=0.0)
    exchange = CoordinatorExchange(DirectLine(service), key=b"a", nonce=b"1")

    def kept() -> dict[str, bytes]:
        files = service.journal.constants
        there = [each for each in SPECS if each.digest in files.complete]
        return {each.digest: b"".join(files.parts(each)) for each in there}

    return Place(exchange, kept)


def in_a_bucket(settings: RunSettings) -> Place:
    beach = Beach(settings)

    def kept() -> dict[str, bytes]:
        document = fetch(beach.store, documents.RUN, keys.RUN)
        objects = ConstantObjects(beach.store, document)
        there = [each for each in SPECS if each.digest in document.constants]
        return {
            each.digest: b"".join(map(bytes, objects.parts(each))) for each in there
        }

    return Place(beach.attach("a")[0], kept)


EACH_PLACE = pytest.mark.parametrize(
    "place", [in_memory, at_a_coordinator, in_a_bucket], ids=lambda each: each.__name__
)
Make = Callable[[RunSettings], Place]


@EACH_PLACE
def test_what_a_founder_brings_is_kept(place: Make) -> None:
    """Every byte of it, however it comes in parts; what has no bytes needs none."""
    there = place(plain_settings())
    found(there.exchange, Held())

    assert there.kept() == {SPECS[0].digest: BASE, SPECS[1].digest: TABLE}


@EACH_PLACE
def test_a_founder_that_brings_none_founds_a_run_without(place: Make) -> None:
    """As one does whose settings say that the run keeps none."""
    there = place(plain_settings())
    enter(there.exchange, "a", model=MODEL)
    declined = RunSettings.from_dict(
        plain_settings().to_dict() | {"limits": {"max_constants_bytes": 0}}
    )
    without = place(declined)
    held = Held()
    found(without.exchange, held)

    assert there.kept() == without.kept() == {}
    assert held.asked == []


@EACH_PLACE
def test_bytes_that_are_not_the_constants_are_not_kept(place: Make) -> None:
    """A tensor that was changed after its digest was told founds nothing."""
    there = place(plain_settings())
    joined = begin(there.exchange)

    for wrong in (BASE[::-1], BASE[:-4], BASE + b"more"):
        with pytest.raises((CorruptError, UsageError), match="base"):
            there.exchange.keep(joined, MODEL, Held({"base": wrong, "table": TABLE}))
    there.exchange.keep(joined, MODEL, Held())
    settle(there.exchange, joined)
    assert len(there.kept()) == 2


@EACH_PLACE
def test_more_than_the_run_keeps_is_refused_with_the_way_out(place: Make) -> None:
    """The founder learns both numbers before anything is sent."""
    limits = {"max_constants_bytes": 87}
    there = place(
        RunSettings.from_dict(plain_settings().to_dict() | {"limits": limits})
    )
    held = Held()

    with pytest.raises(UsageError, match=r"take 88 bytes, above .*=87.* to 0"):
        there.exchange.keep(begin(there.exchange), MODEL, held)
    assert held.asked == []


def test_a_founder_goes_on_where_another_was_cut_off() -> None:
    """What is whole is not sent again, and of a draft only the rest is."""
    service = Service.create(SimDisk(), plain_settings(), run="run", now_s=0.0)
    exchange = CoordinatorExchange(DirectLine(service), key=b"a", nonce=b"1")
    joined = begin(exchange)
    service.journal.constants.store(SPECS[1], [TABLE])
    service.journal.constants.take(SPECS[0], 0, BASE[:20])
    held = Held()
    exchange.keep(joined, MODEL, held)

    assert held.asked == [("base", 20)]
    assert service.journal.constants.complete == {each.digest for each in SPECS[:2]}


def test_a_large_constant_is_some_objects_of_a_bucket() -> None:
    """Ranges are read across their borders, and what is gone is told by its key."""
    values = bytes(range(256)) * (OBJECT_BYTES // 256) + b"the last object"
    large = constant("large", values, "uint8", len(values))
    store, nonce = MemoryStore(), "ab"
    put_constant(
        store.put, nonce, large, Held({"large": values}, PART_BYTES).parts(large)
    )
    document = RunDocument(run="run", fingerprint="", founding=nonce, model=MODEL)
    objects = ConstantObjects(store, document)

    assert [item.size for item in store.items("founding/")] == [OBJECT_BYTES, 15]
    first, last = OBJECT_BYTES - 3, OBJECT_BYTES + 3
    assert objects.read(large, first, last) == values[first:last]
    store.remove([keys.constant_part(nonce, large.digest, 1)])
    with pytest.raises(CorruptError, match=r"constants/.*/1 is gone.*source="):
        objects.read(large, first, last)
