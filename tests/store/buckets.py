"""Real stores on loopback, for one test run each: SeaweedFS, Azurite, rclone."""

from __future__ import annotations

import base64
import hmac
import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import obstore
from obstore.exceptions import BaseError

from atoll.store.obstore import RETRIES, ObstoreStore
from tests.engines import engine, free_port, free_ports, running

BUCKET = "atoll"
ACCOUNT, AZURE_VERSION = "devstoreaccount1", "2021-08-06"
ACCOUNT_KEY = (  # of every Azurite; known to everybody
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq"
    "/K1SZFPTOtr/KBHBeksoGMGw=="
)
KEY, SECRET = "reef", "lagoon-secret"
NUMBERS = itertools.count()

Settings = dict[str, str]


EVERYTHING = ("GetObject", "PutObject", "ListBucket", "DeleteObject")


def identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, Any]:
    """Return somebody that SeaweedFS knows."""
    credentials = [{"accessKey": key, "secretKey": secret}]
    return {"name": name, "credentials": credentials, "actions": actions}


def without(permission: str) -> dict[str, Any]:
    """Return somebody who may do everything but one thing, named after it."""
    name, known = f"without-{permission}", as_without(permission)
    key, secret = known["access_key_id"], known["secret_access_key"]
    return identity(name, key, secret, []) | {"policyNames": [name]}


def as_without(permission: str) -> Settings:
    """Return the settings by which to come as somebody who lacks a permission."""
    name = permission.lower()
    return {"access_key_id": f"key-{name}", "secret_access_key": f"secret-{name}"}


def _policy(permission: str) -> Settings:
    allowed = [f"s3:{each}" for each in EVERYTHING if each != permission]
    where = ["arn:aws:s3:::*", "arn:aws:s3:::*/*"]
    said = {"Effect": "Allow", "Action": allowed, "Resource": where}
    text = json.dumps({"Version": "2012-10-17", "Statement": [said]})
    return {"name": f"without-{permission}", "content": text}


def seaweedfs_command(
    home: Path, ports: list[int], *, others: tuple[dict[str, Any], ...] = ()
) -> list[object]:
    """Return the command of a SeaweedFS whose data and settings are in a folder.

    The third port is that of the filer, the fourth that of S3.
    """
    weed = engine("weed")
    home.mkdir(parents=True, exist_ok=True)
    admin = identity("admin", KEY, SECRET, ["Admin", "Read", "Write", "List"])
    known = [admin, *map(without, ("nothing", *EVERYTHING)), *others]
    policies = [_policy(each) for each in ("nothing", *EVERYTHING)]
    (home / "s3.json").write_text(
        json.dumps({"identities": known, "policies": policies})
    )
    names = ("master", "volume", "filer", "s3")
    words = [f"-{name}.port={ports[at]}" for at, name in enumerate(names)]
    words += [f"-{name}.port.grpc={ports[4 + at]}" for at, name in enumerate(names)]
    words += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={home}"]
    words += ["-filer", "-s3", f"-s3.config={home / 's3.json'}"]
    words += ["-master.volumeSizeLimitMB=256", "-volume.max=40"]
    # What would listen at a fixed port, where only one could run, or call home.
    words += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    return [weed, "server", *words]


@contextmanager
def seaweedfs(
    home: Path, *, others: tuple[dict[str, Any], ...] = ()
) -> Iterator[Settings]:
    """Give the settings of a bucket in a real S3 that enforces conditional puts."""
    ports = free_ports(8)
    words = seaweedfs_command(home, ports, others=others)
    where = s3_settings(ports[3])
    ready = partial(has_bucket, where, ports[2])
    with running(words, home=home / "log", is_ready=ready):
        yield where


@contextmanager
def rclone(home: Path) -> Iterator[Settings]:
    """Give the settings of a bucket that puts over what is there."""
    port = free_port()
    (home / "data" / BUCKET).mkdir(parents=True)
    words = ["serve", "s3", home / "data", f"--addr=127.0.0.1:{port}"]
    words += [f"--auth-key={KEY},{SECRET}", f"--config={home / 'none'}"]
    where = s3_settings(port)
    ready = partial(_answers, where)
    with running([engine("rclone"), *words], home=home / "log", is_ready=ready):
        yield where


@contextmanager
def azurite(home: Path) -> Iterator[Settings]:
    """Give the settings of a container in Azure's own emulator."""
    port = free_port()
    words = ["--blobHost", "127.0.0.1", "--blobPort", port, "--location", home / "data"]
    words += ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    where = {
        "account_name": ACCOUNT,
        "account_key": ACCOUNT_KEY,
        "container_name": BUCKET,
        "endpoint": f"http://127.0.0.1:{port}/{ACCOUNT}",
    }
    ready = partial(_has_container, port)
    program = [engine("azurite-blob", needs=["node", "npm"]), *words]
    with running(program, home=home / "log", is_ready=ready):
        yield where


def azure_store(where: Settings, *, prefix: str | None = None) -> ObstoreStore:
    """Return a store in a part of a container of its own."""
    prefix = prefix or f"run-{next(NUMBERS)}"
    store = obstore.store.AzureStore(
        **where,  # type: ignore[arg-type]  # names of settings as words
        prefix=prefix,
        client_options={"allow_http": True},
        retry_config=RETRIES,
    )
    return ObstoreStore(store, name=f"az://{where['container_name']}/{prefix}")


def _has_container(port: int) -> bool:
    """Make the container; False: not answering yet."""
    try:
        ask_azure("PUT", port, BUCKET)
    except urllib.error.HTTPError as exc:
        if exc.code == 409:
            return True
        raise AssertionError(exc.read()) from exc
    except OSError:
        return False
    return True


def ask_azure(method: str, port: int, container: str) -> None:
    """Make or delete a container, by a request signed as Azure wants it."""
    path = f"/{ACCOUNT}/{container}"
    headers = {
        "x-ms-date": format_datetime(datetime.now(UTC), usegmt=True),
        "x-ms-version": AZURE_VERSION,
    }
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = method + "\n" * 12 + f"{named}/{ACCOUNT}{path}\nrestype:container"
    headers["authorization"] = f"SharedKey {ACCOUNT}:{_signed(text)}"
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}?restype=container",
        method=method,
        headers=headers,
    )
    urllib.request.urlopen(asked, timeout=5).close()


def shared_access(letters: str) -> str:
    """Return a signature that lets whoever has it do what the letters say."""
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    ends = until.strftime("%Y-%m-%dT%H:%M:%SZ")
    said = (ACCOUNT, letters, "b", "sco", "", ends, "", "http,https", AZURE_VERSION)
    signed = _signed("\n".join((*said, "", "")))
    names = {"sv": AZURE_VERSION, "ss": "b", "srt": "sco", "sp": letters}
    return urlencode(names | {"se": ends, "spr": "http,https", "sig": signed})


def _signed(text: str) -> str:
    key = base64.b64decode(ACCOUNT_KEY)
    return base64.b64encode(hmac.digest(key, text.encode(), "sha256")).decode()


def ask_s3(method: str, where: Settings) -> None:
    """Make or delete a bucket."""
    place = obstore.sign(_s3(where, ""), method, "", timedelta(minutes=1))  # type: ignore[call-overload]  # any verb is one
    urllib.request.urlopen(urllib.request.Request(place, method=method)).close()


def s3_settings(port: int) -> Settings:
    """Return what reaches a bucket of S3 on this machine."""
    return {
        "bucket": BUCKET,
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
    }


def s3_store(where: Settings, *, prefix: str | None = None) -> ObstoreStore:
    """Return a store in a part of a bucket of its own."""
    prefix = prefix or f"run-{next(NUMBERS)}"
    return ObstoreStore(_s3(where, prefix), name=f"s3://{where['bucket']}/{prefix}")


def _s3(where: Settings, prefix: str) -> Any:
    return obstore.store.S3Store(
        **where,  # type: ignore[arg-type]  # names of settings as words
        prefix=prefix,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        retry_config=RETRIES,
    )


def has_bucket(where: Settings, filer_port: int) -> bool:
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


def _answers(where: Settings) -> bool:
    try:
        list(obstore.list(s3_store(where)._store))
    except (BaseError, OSError):
        return False
    return True
