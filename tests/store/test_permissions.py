"""A missing permission is named, with its remedy, on real stores."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from atoll.errors import StoreDenied
from atoll.store import (
    FileStore,
    RetryingStore,
    Store,
    probe,
)
from tests.store.buckets import (
    ACCOUNT,
    EVERYTHING,
    Settings,
    as_without,
    azure_store,
    s3_store,
    shared_access,
)

NOBODY = 65534
ACTS: dict[str, Callable[[Store], object]] = {
    "GetObject": lambda store: store.get("there"),
    "PutObject": lambda store: puts(store),
    "ListBucket": lambda store: store.items(""),
    "DeleteObject": lambda store: removes(store),
}
LETTERS = {"GetObject": "r", "PutObject": "wc", "ListBucket": "l", "DeleteObject": "d"}


def puts(store: Store) -> None:
    """Put what is new, and what is our own."""
    store.put_new("new", [b"1"])
    store.put("own", [b"1"])


def removes(store: Store) -> None:
    """Remove one, and several at once."""
    store.remove(["a"])
    store.remove(["b", "c"])


def refuses(act: Callable[[Store], object], store: Store) -> str:
    """Return what a store says when it does not let us."""
    with pytest.raises(StoreDenied) as told:
        act(RetryingStore(store, sleep=_never))
    return str(told.value)


def _never(seconds: float) -> None:
    raise AssertionError(f"asked again after {seconds} s for what nobody allows")


@pytest.mark.parametrize("lacking", EVERYTHING)
def test_a_permission_that_s3_does_not_give_is_named(
    s3: Settings, lacking: str
) -> None:
    """Each alone: all else works, and nobody asks again for what is not allowed."""
    prefix = f"lacks-{lacking.lower()}"
    admin = s3_store(s3, prefix=prefix)
    for key in ("there", "a", "b", "c"):
        admin.put(key, [b"1"])
    store = s3_store(s3 | as_without(lacking), prefix=prefix)

    said = refuses(ACTS[lacking], store)
    assert f"s3://atoll/{prefix} " in said
    assert f"Give its credentials s3:{lacking}" in said
    for name, act in ACTS.items():
        if name != lacking:
            act(store)


# Azurite answers 500 to any delete with a shared access signature: that one is below.
@pytest.mark.parametrize("lacking", EVERYTHING[:3])
def test_a_permission_that_azure_does_not_give_is_named(
    azure: Settings, lacking: str
) -> None:
    """By the letter of a shared access signature."""
    prefix = f"lacks-{lacking.lower()}"
    admin = azure_store(azure, prefix=prefix)
    for key in ("there", "a", "b", "c"):
        admin.put(key, [b"1"])
    letters = "".join(each for name, each in LETTERS.items() if name != lacking)
    signed = {"sas_key": shared_access(letters)}
    named = {name: each for name, each in azure.items() if name != "account_key"}
    store = azure_store(named | signed, prefix=prefix)

    said = refuses(ACTS[lacking], store)
    assert f"{' and '.join(sorted(LETTERS[lacking]))} in its shared access" in said


class Batches(BaseHTTPRequestHandler):
    """Answers as Azure does to who may delete nothing: yes as a whole, no to each."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        refusals = "".join(
            "--batch\r\nContent-Type: application/http\r\n"
            f"Content-ID: {number}\r\n\r\n"
            "HTTP/1.1 403 This request is not authorized to perform this operation "
            "using this permission.\r\n"
            "x-ms-error-code: AuthorizationPermissionMismatch\r\n\r\n"
            for number in range(asked.count(b"DELETE /"))
        )
        body = f"{refusals}--batch--\r\n".encode()
        self.send_response(202)
        self.send_header("Content-Type", "multipart/mixed; boundary=batch")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("keys", [["a"], ["b", "c"]], ids=["one", "several"])
def test_that_azure_lets_nobody_delete_is_told(keys: list[str]) -> None:
    """It answers for a batch: each object in it has a status of its own."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Batches) as answering:
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        store = azure_store(
            {
                "account_name": ACCOUNT,
                "sas_key": shared_access("rwcl"),
                "container_name": "atoll",
                "endpoint": f"http://127.0.0.1:{answering.server_port}/{ACCOUNT}",
            }
        )
        said = refuses(lambda each: each.remove(keys), store)
        answering.shutdown()
    assert "or d in its shared access signature" in said


@pytest.mark.parametrize("lacking", EVERYTHING)
def test_a_probe_finds_the_permission_that_is_missing(
    s3: Settings, lacking: str
) -> None:
    """At the start, not when the first object is to be collected hours later."""
    store = s3_store(s3 | as_without(lacking))
    assert f"s3:{lacking}" in refuses(probe, store)


def test_who_may_do_everything_is_let(s3: Settings) -> None:
    """The check can pass: the same acts, with all permissions."""
    probe(s3_store(s3 | as_without("nothing")))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"secret_access_key": "wrong"}, "SignatureDoesNotMatch"),
        ({"access_key_id": "stranger"}, "InvalidAccessKeyId"),
    ],
)
def test_wrong_credentials_are_told_from_missing_permissions(
    s3: Settings, wrong: Settings, said: str
) -> None:
    """A permission would not help; the credentials have to be renewed."""
    for act in ACTS.values():
        text = refuses(act, s3_store(s3 | wrong))
        assert said in text
        assert "Renew them" in text


@contextmanager
def directory_of_root() -> Iterator[tuple[Path, FileStore]]:
    """Give a store whose owner is not the user that the block runs as."""
    place = Path(tempfile.mkdtemp(prefix="atoll-"))  # nobody may enter tmp_path
    try:
        place.chmod(0o755)
        root = place / "store"
        store = FileStore(root)
        store.put_new("there/a", [b"1"])
        (root / ".~").chmod(0o777)
        yield root, store
    finally:
        shutil.rmtree(place)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Be a user whom permissions concern, which root is not."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(mine)


@pytest.mark.parametrize(
    ("mode", "act"),
    [
        (0o000, lambda store: store.get("there/a")),
        (0o311, lambda store: store.items("there/")),
        (0o555, lambda store: store.put_new("there/b", [b"2"])),
        (0o555, lambda store: store.put("there/b", [b"2"])),
        (0o555, lambda store: store.remove(["there/a"])),
    ],
    ids=["read", "list", "write", "overwrite", "delete"],
)
def test_a_permission_of_a_directory_is_named(
    mode: int, act: Callable[[Store], object]
) -> None:
    """With the path, the user and what it may not do."""
    with directory_of_root() as (root, store):
        (root / "there").chmod(mode)
        with as_nobody():
            said = refuses(act, store)
            user = os.geteuid()
        (root / "there").chmod(0o755)
    assert "/store/there" in said
    assert f"Give user {user} the permission to" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of another user")
def test_deleting_alone_may_be_forbidden_in_a_directory() -> None:
    """A sticky directory takes new files from all, and gives up only their own."""
    with directory_of_root() as (root, store):
        (root / "there").chmod(0o1777)
        with as_nobody():
            assert store.put_new("there/b", [b"2"])
            store.items("there/")
            store.remove(["there/b"])
            said = refuses(lambda each: each.remove(["there/a"]), store)
    assert "cannot remove" in said


def test_a_directory_that_nobody_lets_us_make_is_told() -> None:
    """The error of the first moment names the path."""
    with directory_of_root() as (root, _):
        root.chmod(0o555)
        with as_nobody(), pytest.raises(StoreDenied, match=r"cannot make.*Give user"):
            FileStore(root / "deeper")
        root.chmod(0o755)
