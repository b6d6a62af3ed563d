"""Contract of every `Store`, as claims that any adapter's tests can run.

A claim takes `open_store`, which returns an empty store, or an empty prefix of one:
several may be opened, and none may see another's objects. Run each one separately:

    @pytest.mark.parametrize("claim", STORE_CLAIMS, ids=lambda claim: claim.__name__)
    def test_it_is_a_store(claim):
        claim(open_my_store)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from atoll.errors import NoSuchObject, UsageError
from atoll.store import Item, Store, probe
from atoll.testing.fixtures import raises

OpenStore = Callable[[], Store]
Claim = Callable[[OpenStore], None]

RACERS, RACES = 8, 5
LARGE = 5_000_001
"""Bytes: more than one part of an upload in parts would have."""

BAD_KEYS = ("", "/a", "a/", "a//b", "../a", "a/../b", ".", "A", "a b", "ä", "a\\b", "~")


def an_object_is_what_was_put(open_store: OpenStore) -> None:
    """Its content is its parts in order, without gaps."""
    store = open_store()
    assert store.put_new("a/b", [b"one ", bytearray(b"two "), memoryview(b"three")])

    assert bytes(store.get("a/b")) == b"one two three"


def an_empty_object_is_there(open_store: OpenStore) -> None:
    """An empty object is listed and can be read, unlike a missing one."""
    store = open_store()
    assert store.put_new("empty", [])
    store.put("void", [b""])

    assert bytes(store.get("empty")) == bytes(store.get("void")) == b""
    assert bytes(store.get("empty", 0, 5)) == bytes(store.get("empty", 3)) == b""
    assert store.items("") == [Item("empty", 0), Item("void", 0)]


def a_large_object_is_whole(open_store: OpenStore) -> None:
    """Many parts, some of them empty, are stored in order."""
    store = open_store()
    content = bytes(number % 251 for number in range(LARGE))
    assert store.put_new(
        "large", [content[:1], b"", content[1:70_000], content[70_000:]]
    )

    assert bytes(store.get("large")) == content
    assert bytes(store.get("large", LARGE - 3)) == content[-3:]


def a_range_ends_where_the_object_does(open_store: OpenStore) -> None:
    """A range beyond the end is empty, and no error."""
    store = open_store()
    store.put_new("digits", [b"0123456789"])

    assert bytes(store.get("digits", 2, 3)) == b"234"
    assert bytes(store.get("digits", 8, 100)) == b"89"
    assert bytes(store.get("digits", 4)) == b"456789"
    assert bytes(store.get("digits", 10, 5)) == b""
    assert bytes(store.get("digits", 99, 5)) == b""
    assert bytes(store.get("digits", 3, 0)) == b""


def a_range_from_below_nothing_is_refused(open_store: OpenStore) -> None:
    """Negative numbers do not count from the end."""
    store = open_store()
    store.put_new("digits", [b"0123456789"])
    with raises(UsageError):
        store.get("digits", -1)
    with raises(UsageError):
        store.get("digits", 0, -1)


def what_is_not_there_is_named(open_store: OpenStore) -> None:
    """A missing key raises `NoSuchObject`, also as the prefix of another key."""
    store = open_store()
    store.put_new("a/b/c", [b"1"])
    for key in ("x", "a/b", "a/b/c/d", "a/b/x"):
        with raises(NoSuchObject):
            store.get(key)
        with raises(NoSuchObject):
            store.get(key, 5, 0)


def what_was_put_new_stays(open_store: OpenStore) -> None:
    """The second put_new returns False, and changes no byte."""
    store = open_store()
    assert store.put_new("key", [b"first"])
    assert not store.put_new("key", [b"second"])
    assert not store.put_new("key", [b"first"])

    assert bytes(store.get("key")) == b"first"


def one_of_many_puts_a_new_object(open_store: OpenStore) -> None:
    """Of eight concurrent puts exactly one returns True, and its bytes are stored."""
    store = open_store()
    with ThreadPoolExecutor(RACERS) as threads:
        for race in range(RACES):
            key = f"race/{race}"
            texts = [f"racer {number}".encode() for number in range(RACERS)]
            won = threads.map(lambda text, key=key: store.put_new(key, [text]), texts)
            winners = [
                text for text, is_first in zip(texts, won, strict=True) if is_first
            ]

            assert len(winners) == 1
            assert bytes(store.get(key)) == winners[0]


def an_owner_overwrites(open_store: OpenStore) -> None:
    """A later read returns the last put, also if it is shorter."""
    store = open_store()
    store.put("member", [b"a long first heartbeat"])
    store.put("member", [b"second"])

    assert bytes(store.get("member")) == b"second"
    assert store.items("") == [Item("member", 6)]


def who_reads_sees_a_whole_object(open_store: OpenStore) -> None:
    """While an owner overwrites, every read returns one of the two contents."""
    store = open_store()
    texts = (b"a" * 30_000, b"b" * 70_000)
    store.put("member", [texts[0]])
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(_overwrite, store, "member", texts)
        while not writing.done():
            assert bytes(store.get("member")) in texts
        writing.result()


def a_list_has_what_is_below_a_prefix(open_store: OpenStore) -> None:
    """Keys in order, at any depth, with sizes, and none outside of the prefix."""
    store = open_store()
    for key in ("up/b.2", "up/a/deep", "up/b.1", "upper/x", "other", "up.x"):
        store.put_new(key, [key.encode()])

    expected = [Item(key, len(key)) for key in ("up/a/deep", "up/b.1", "up/b.2")]
    assert store.items("up/") == expected
    assert len(store.items("")) == 6
    assert store.items("nothing/") == []


def what_is_removed_is_gone(open_store: OpenStore) -> None:
    """Removing missing keys is no error, and a removed key can be put again."""
    store = open_store()
    store.put_new("a/1", [b"1"])
    store.put_new("a/2", [b"2"])
    store.put_new("b", [b"3"])
    store.remove(["a/1", "a/2", "never"])
    store.remove(["never"])
    store.remove([])

    assert store.items("") == [Item("b", 1)]
    assert store.put_new("a/1", [b"again"])


def a_bad_key_is_refused(open_store: OpenStore) -> None:
    """Every method refuses it before any request."""
    store = open_store()
    for key in (*BAD_KEYS, "a" * 201, "a/" * 256 + "a"):
        for act in (
            lambda: store.put_new(key, [b""]),  # noqa: B023
            lambda: store.put(key, [b""]),  # noqa: B023
            lambda: store.get(key),  # noqa: B023
            lambda: store.remove([key]),  # noqa: B023
        ):
            with raises(UsageError):
                act()
    with raises(UsageError):
        store.items("no-slash")
    assert store.items("") == []


def two_stores_do_not_meet(open_store: OpenStore) -> None:
    """Each prefix of a bucket is a separate store."""
    a, b = open_store(), open_store()
    a.put_new("key", [b"a"])

    assert b.items("") == []
    assert b.put_new("key", [b"b"])
    assert bytes(a.get("key")) == b"a"


def a_probe_finds_what_is_declared(open_store: OpenStore) -> None:
    """The probe returns the declared traits, and leaves no object."""
    store = open_store()
    assert probe(store) == store.traits
    assert store.items("") == []


_ANYWHERE: tuple[Claim, ...] = (
    an_object_is_what_was_put,
    an_empty_object_is_there,
    a_large_object_is_whole,
    a_range_ends_where_the_object_does,
    a_range_from_below_nothing_is_refused,
    what_is_not_there_is_named,
    what_was_put_new_stays,
    an_owner_overwrites,
    a_list_has_what_is_below_a_prefix,
    what_is_removed_is_gone,
    a_bad_key_is_refused,
    two_stores_do_not_meet,
    a_probe_finds_what_is_declared,
)

STORE_CLAIMS: tuple[Claim, ...] = (
    *_ANYWHERE,
    who_reads_sees_a_whole_object,
    one_of_many_puts_a_new_object,
)

WEAK_STORE_CLAIMS: tuple[Claim, ...] = _ANYWHERE
"""For a store that declares that it has no conditional put.

Such a store may also serve an object while it is being replaced, as rclone's
`serve s3` does: a document that is read torn does not verify, and is read again.
"""


def _overwrite(store: Store, key: str, texts: tuple[bytes, ...]) -> None:
    for text in texts * 10:
        store.put(key, [text])
