"""The listening sides of `over_http.py`, each in a process of its own.

All hold one buffer, put an upload into it, and send it as a download: nothing else.
"""

from __future__ import annotations

import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REQUEST = struct.Struct("<cQQ")  # of the raw side: P or G, first byte, size


def main() -> None:
    """Listen as the first argument says, with a buffer as large as the second."""
    side, size, *files = sys.argv[1:]
    buffer = memoryview(bytearray(int(size)))
    SIDES[side](buffer, *files)


def say(port: int) -> None:
    """Tell whoever started this process where it listens, and wait for the end."""
    print(port, flush=True)
    sys.stdin.read()


def shown(files: tuple[str, ...]) -> ssl.SSLContext | None:
    """Return the context that shows a certificate, if there is one."""
    if not files:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*files)
    return tls


def ours(buffer: memoryview, *files: str) -> None:
    """Listen as a coordinator does; with TLS if there are a certificate and a key."""
    from atoll.http import Listener, Request, Response
    from atoll.runtime import SystemClock

    tls = shown(files)

    def handle(request: Request) -> Response:
        first = int(request.segments[0])
        if request.method == "GET":
            return Response(body=[buffer])
        request.body.readinto(buffer[first : first + request.body.remaining])
        return Response()

    listener = Listener(handle, host="127.0.0.1", port=0, clock=SystemClock(), tls=tls)
    listener.start()
    say(listener.address[1])
    listener.close(grace_s=0.0)


def send(sock: socket.socket, view: memoryview) -> None:
    """Send all of `view`."""
    while len(view):
        view = view[sock.send(view) :]


def receive(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`."""
    while len(view):
        view = view[sock.recv_into(view) :]


def raw(buffer: memoryview, *files: str) -> None:
    """Listen without HTTP: the floor."""
    door, tls = socket.create_server(("127.0.0.1", 0)), shown(files)

    def serve(sock: socket.socket) -> None:
        if tls is not None:
            sock = tls.wrap_socket(sock, server_side=True)
        while len(asked := sock.recv(REQUEST.size)) == REQUEST.size:
            kind, first, size = REQUEST.unpack(asked)
            view = buffer[first : first + size]
            if kind == b"G":
                send(sock, view)
            else:
                receive(sock, view)
                sock.sendall(b"!")

    def accept() -> None:
        while True:
            sock, _ = door.accept()
            threading.Thread(target=serve, args=[sock], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    say(door.getsockname()[1])


def threading_stdlib(buffer: memoryview) -> None:
    """Listen as `http.server` does, one thread for each connection."""

    class Requests(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(buffer)))
            self.end_headers()
            self.wfile.write(buffer)

        def do_PUT(self) -> None:
            first, size = int(self.path[1:]), int(self.headers["content-length"])
            view = buffer[first : first + size]
            while len(view):
                view = view[self.rfile.readinto(view) :]  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *said: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    say(listener.server_address[1])


def with_aiohttp(buffer: memoryview) -> None:
    """Listen as aiohttp does, in one event loop."""
    import asyncio

    from aiohttp import web

    async def put(request: web.Request) -> web.Response:
        at = int(request.match_info["first"])
        async for data in request.content.iter_any():
            buffer[at : at + len(data)] = data
            at += len(data)
        return web.Response()

    async def get(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(buffer)
        await response.prepare(request)
        for at in range(0, len(buffer), 2**20):
            await response.write(buffer[at : at + 2**20])
        return response

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.put("/{first}", put), web.get("/{first}", get)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        await asyncio.get_running_loop().run_in_executor(None, say, port)
        await runner.cleanup()

    asyncio.run(serve())


SIDES: dict[str, Callable[..., None]] = {
    "ours": ours,
    "ours TLS": ours,
    "raw socket": raw,
    "raw TLS": raw,
    "http.server": threading_stdlib,
    "aiohttp": with_aiohttp,
}

if __name__ == "__main__":
    main()
