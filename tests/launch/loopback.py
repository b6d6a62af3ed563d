"""Serves a cloud on the loopback address, with the containers that run in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.launch.containers import Container


def send(
    answer: BaseHTTPRequestHandler, status: int, data: bytes, *, kind: str
) -> None:
    """Answer with a whole body."""
    answer.send_response(status)
    answer.send_header("Content-Type", kind)
    answer.send_header("Content-Length", str(len(data)))
    answer.end_headers()
    answer.wfile.write(data)


@contextmanager
def answering(
    answers: type[BaseHTTPRequestHandler], containers: Mapping[str, Container]
) -> Iterator[str]:
    """Serve under the URL that this gives, until the end, and leave no process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for container in containers.values():
            container.kill()
