"""Real stores on loopback, for one test run each: SeaweedFS and rclone."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError

from atoll.store.with_obstore import RETRIES, ObstoreStore
from tests.engines import engine, free_port, running

BUCKET = "atoll"
KEY, SECRET = "reef", "lagoon-secret"
NUMBERS = itertools.count()

Open = Callable[[], ObstoreStore]


def identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, Any]:
    """Return somebody that SeaweedFS knows."""
    credentials = [{"accessKey": key, "secretKey": secret}]
    return {"name": name, "credentials": credentials, "actions": actions}


@contextmanager
def seaweedfs(
    home: Path, *, others: tuple[dict[str, Any], ...] = ()
) -> Iterator[dict[str, str]]:
    """Give the settings of a bucket in a real S3 that enforces conditional puts."""
    weed, ports = engine("weed"), [free_port() for _ in range(8)]
    home.mkdir(parents=True)
    admin = identity("admin", KEY, SECRET, ["Admin", "Read", "Write", "List"])
    (home / "s3.json").write_text(json.dumps({"identities": [admin, *others]}))
    names = ("master", "volume", "filer", "s3")
    words = [f"-{name}.port={ports[at]}" for at, name in enumerate(names)]
    words += [f"-{name}.port.grpc={ports[4 + at]}" for at, name in enumerate(names)]
    words += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={home}"]
    words += ["-filer", "-s3", f"-s3.config={home / 's3.json'}"]
    words += ["-master.volumeSizeLimitMB=256", "-volume.max=8"]
    where = s3_settings(ports[3])
    ready = partial(_has_bucket, where, ports[2])
    with running([weed, "server", *words], home=home / "log", is_ready=ready):
        yield where


@contextmanager
def rclone(home: Path) -> Iterator[dict[str, str]]:
    """Give the settings of a bucket that puts over what is there."""
    port = free_port()
    (home / "data" / BUCKET).mkdir(parents=True)
    words = ["serve", "s3", home / "data", f"--addr=127.0.0.1:{port}"]
    words += [f"--auth-key={KEY},{SECRET}", f"--config={home / 'none'}"]
    where = s3_settings(port)
    ready = partial(_answers, where)
    with running([engine("rclone"), *words], home=home / "log", is_ready=ready):
        yield where


def s3_settings(port: int) -> dict[str, str]:
    """Return what reaches a bucket of S3 on this machine."""
    return {
        "bucket": BUCKET,
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
    }


def s3_store(where: dict[str, str], *, prefix: str | None = None) -> ObstoreStore:
    """Return a store in a part of a bucket of its own."""
    prefix = prefix or f"run-{next(NUMBERS)}"
    store = obstore.store.S3Store(
        **where,  # type: ignore[arg-type]  # names of settings as words
        prefix=prefix,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        retry_config=RETRIES,
    )
    return ObstoreStore(store, name=f"s3://{where['bucket']}/{prefix}")


def _has_bucket(where: dict[str, str], filer_port: int) -> bool:
    """Make the bucket, which is a directory of the filer; False: not answering yet."""
    place = f"http://127.0.0.1:{filer_port}/buckets/{BUCKET}/"
    asked = urllib.request.Request(place, method="POST")
    try:
        urllib.request.urlopen(asked, timeout=5).close()
    except urllib.error.HTTPError as exc:
        return exc.code == 409 and _answers(where)  # it is there already
    except OSError:
        return False
    return _answers(where)


def _answers(where: dict[str, str]) -> bool:
    try:
        list(obstore.list(s3_store(where)._store))
    except (BaseError, OSError):
        return False
    return True
