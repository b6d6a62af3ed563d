"""How fast is a large body over our HTTP, beside a raw socket and other stacks?

One upload and one download of all elements in fp32, and four uploads of a quarter at
once, on loopback; each listening side is a process of its own and holds its buffer
already. A ratio of 0.9 to the raw socket means that it takes a ninth longer; to others,
a ratio of 2 means that ours takes half as long.
"""

from __future__ import annotations

import datetime
import importlib.util
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from _http_sides import REQUEST, SIDES, receive, send
from _timing import Row, arguments, medians, report
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.http import Download, HttpClient

FLOOR = "raw socket"
AT_ONCE = 4
LIMIT = 0.67
"""A round's transfers may cost 1.5 times the floor."""


def main() -> None:
    """Print the table."""
    given = arguments(__doc__ or "")
    body = memoryview(np.ones(given.elements, np.float32)).cast("B")
    place = memoryview(np.zeros(given.elements, np.float32)).cast("B")
    sides = [side for side in SIDES if side != "aiohttp" or has_aiohttp()]
    with ExitStack() as stack, ThreadPoolExecutor(AT_ONCE) as threads:
        files = certificate(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        ports = {side: start(side, len(body), files, stack) for side in sides}
        rows = []
        for what, action in actions(body, place, threads).items():
            took = medians(
                {side: action(side, ports[side]) for side in sides}, turns=given.turns
            )
            rows += compare(what, took)
    report(f"HTTP on loopback, {len(body)} bytes", rows)
    if not has_aiohttp():
        print("aiohttp is left out: its package is missing.")


def actions(
    body: memoryview, place: memoryview, threads: ThreadPoolExecutor
) -> dict[str, Callable[[str, int], Callable[[], object]]]:
    """Return, for each thing that is timed, what makes its action for a side."""
    quarter = len(body) // AT_ONCE
    starts = [number * quarter for number in range(AT_ONCE)]

    def put(side: str, port: int) -> Callable[[], object]:
        ask = asking(side, port)
        return lambda: ask.put(0, body)

    def get(side: str, port: int) -> Callable[[], object]:
        ask = asking(side, port)
        return lambda: ask.get(place)

    def put_at_once(side: str, port: int) -> Callable[[], object]:
        asks = [asking(side, port) for _ in starts]

        def run() -> None:
            parts = [body[first : first + quarter] for first in starts]
            list(threads.map(lambda ask, *to: ask.put(*to), asks, starts, parts))

        return run

    return {"PUT": put, "GET": get, f"{AT_ONCE} PUTs at once": put_at_once}


def compare(what: str, took: dict[str, float]) -> list[Row]:
    """Return ours beside all others, with and without TLS."""
    mine = took["ours"]
    rows = [
        Row(
            what=f"{what} beside {other}",
            ours_s=mine,
            peer_s=took[other],
            ratio=took[other] / mine,
            limit=LIMIT if other == FLOOR else None,
        )
        for other in took
        if other != "ours" and not is_encrypted(other)
    ]
    tls, floor = took["ours TLS"], took["raw TLS"]
    said = f"{what} with TLS beside raw TLS"
    return [*rows, Row(what=said, ours_s=tls, peer_s=floor, ratio=floor / tls)]


def is_encrypted(side: str) -> bool:
    """Return whether a side speaks TLS."""
    return side.endswith("TLS")


class OverHttp:
    """Asks any side that speaks HTTP, with our caller."""

    def __init__(self, port: int, tls: ssl.SSLContext | None) -> None:
        self._caller = HttpClient(
            "127.0.0.1", port, timeout_s=60.0, connect_timeout_s=10.0, tls=tls
        )

    def put(self, first: int, view: memoryview) -> None:
        assert self._caller.call("PUT", f"/{first}", body=[view]).status == 200

    def get(self, place: memoryview) -> None:
        reply = self._caller.call(
            "GET", "/0", fetching=Download(lambda size: place[:size])
        )
        assert len(reply.body) == len(place)


class OverSocket:
    """Asks the floor."""

    def __init__(self, port: int, tls: ssl.SSLContext | None) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        if tls is not None:
            self._sock = tls.wrap_socket(self._sock)

    def put(self, first: int, view: memoryview) -> None:
        self._sock.sendall(REQUEST.pack(b"P", first, len(view)))
        send(self._sock, view)
        assert self._sock.recv(1) == b"!"

    def get(self, place: memoryview) -> None:
        self._sock.sendall(REQUEST.pack(b"G", 0, len(place)))
        receive(self._sock, place)


def asking(side: str, port: int) -> OverHttp | OverSocket:
    """Return the asking side for a listening one."""
    kind = OverSocket if side.startswith("raw") else OverHttp
    if not is_encrypted(side):
        return kind(port, None)
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusted.check_hostname = False
    trusted.verify_mode = ssl.CERT_NONE
    return kind(port, trusted)


def start(side: str, size: int, files: list[str], stack: ExitStack) -> int:
    """Start a listening side, and return its port."""
    script = str(Path(__file__).with_name("_http_sides.py"))
    process = stack.enter_context(
        subprocess.Popen(
            [
                sys.executable,
                script,
                side,
                str(size),
                *(files if is_encrypted(side) else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.stdin.close)
    return int(process.stdout.readline())


def has_aiohttp() -> bool:
    """Return whether aiohttp is there to be compared with."""
    return importlib.util.find_spec("aiohttp") is not None


def certificate(folder: Path) -> list[str]:
    """Make a certificate and a key, and return their files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "certificate").write_bytes(made.public_bytes(encoding))
    (folder / "key").write_bytes(key.private_bytes(encoding, *plain))
    return [str(folder / "certificate"), str(folder / "key")]


if __name__ == "__main__":
    main()
