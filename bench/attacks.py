"""What does an honest island notice of an attack on its coordinator?

An island of 1M parameters trains with a real coordinator: for a quiet minute, then
beside each attack, which has 50 connections to it and a process of its own. Every case
has a new run. The commit latency is from the first byte of an update to the last byte
of its outcome; a round is missed if its roster does not count the island. The ratios
are to the quiet minute. All load goes to 127.0.0.1 and ends with its case.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _light import joining, model_of, sealed, some_values
from _served import Served, Settings, serving
from _timing import parse

from atoll.errors import AtollError
from atoll.exchange import CoordinatorExchange, Frame
from atoll.exchange.api import PROTOCOL, Identity, proof_text
from atoll.exchange.over_http import HttpTransport
from atoll.http import HttpClient
from atoll.protocol import JoinReply, JoinRequest
from atoll.routes import BodyKind
from atoll.security import Role, authorization, read_token, token_file
from atoll.weights import FragmentState, lay_out, terms_of
from atoll.wire import blake3_digest

ELEMENTS = 1_000_000
NUM_CONNECTIONS = 50
PER_S = 20
"""Requests per second of one connection, where an attack asks and reads."""

TRAINING_S = 0.05
"""Between two rounds of the honest island."""

TRICKLE_BYTES, TRICKLE_S = 256, 0.25
"""A transfer of 1 KiB/s."""

TIMEOUT_S = 5.0
SETTLING_S = 30.0
"""An attack lasts longer by this: a round waits for silent members for a lease."""

SEGMENT_BYTES = 536
QUIET = "quiet"


# The honest island.


@dataclass
class Figures:
    """What the honest island saw of one case."""

    latencies_s: list[float] = field(default_factory=list)
    missed: int = 0
    shed: Mapping[str, int] = field(default_factory=dict)

    def ms(self, share: float) -> float:
        return 1e3 * float(np.percentile(self.latencies_s, share))


@dataclass
class Island:
    """The founder of a run, and the weights that it holds."""

    exchange: CoordinatorExchange
    joined: JoinReply
    update: Frame
    state: FragmentState

    @classmethod
    def found(cls, line: HttpTransport, elements: int) -> Island:
        """Join as the first, and bring the run its weights."""
        exchange = CoordinatorExchange(line, key=b"honest", nonce=b"1")
        model = model_of(elements)
        joined = exchange.join(JoinRequest(model=model, island="honest"))
        (layout,) = lay_out(model, joined.settings)
        outer = terms_of(layout, joined.settings).outer
        state = FragmentState.found(some_values(elements), outer.optimizer)
        founding = state.to_frame(
            run=joined.run,
            fragment=0,
            outer=outer,
            island=joined.island,
            incarnation=joined.incarnation,
        )
        exchange.publish(Frame(*founding))
        update = sealed(joined.run, joined.settings, elements)
        return cls(exchange, joined, update, state)

    def train(self, seconds: float) -> Figures:
        """Go through rounds for some time."""
        figures, until_s = Figures(), time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(TRAINING_S)
            begun_s = time.monotonic()
            is_counted = self._round()
            figures.latencies_s.append(time.monotonic() - begun_s)
            figures.missed += not is_counted
        return figures

    def _round(self) -> bool:
        number = self.state.round + 1
        header = replace(
            self.update.header,
            round=number,
            base=self.state.digest,
            island=self.joined.island,
            incarnation=self.joined.incarnation,
        )
        self.exchange.publish(Frame(header, self.update.body))
        while (outcome := self.exchange.outcome(0, number, wait_s=2.0)) is None:
            continue
        agreed = outcome.agreed
        self.state.apply(agreed.header, agreed.body)
        assert agreed.header.roster is not None
        return self.joined.island in {
            entry.island for entry in agreed.header.roster.counted
        }


# The attackers.


@dataclass(frozen=True)
class Target:
    """The coordinator that is attacked, and a token of it."""

    address: tuple[str, int]
    directory: Path
    until_s: float

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until_s

    def head(self, line: str, *, has_token: bool = True, **headers: object) -> bytes:
        """Return the head of a request."""
        shown = {"host": "here", "atoll-protocol": str(PROTOCOL)}
        if has_token:
            token = read_token(token_file(self.directory, Role.ISLAND))
            shown["authorization"] = authorization(token)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{line} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (shown | given).items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    @contextmanager
    def connected(self, *, reads: bool = True) -> Iterator[socket.socket]:
        """Connect; one that will not read has as little room for answers as can be."""
        with socket.socket() as sock:
            sock.settimeout(TIMEOUT_S)
            if not reads:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
            sock.connect(self.address)
            yield sock

    @contextmanager
    def line(self) -> Iterator[HttpTransport]:
        """Give an island's line."""
        caller = HttpClient(
            *self.address, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S
        )
        token = read_token(token_file(self.directory, Role.ISLAND))
        headers = {"Authorization": authorization(token)}
        line = HttpTransport(caller, headers=headers)
        try:
            yield line
        finally:
            line.close()

    def hold(self, sock: socket.socket) -> None:
        """Wait without reading until the other side ends it, or all is over."""
        while not self.is_over:
            time.sleep(TRICKLE_S)
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if info[0] != ESTABLISHED:
                return


ESTABLISHED = 1
"""The first byte of what Linux tells of a TCP connection: its state."""


def pipelined(target: Target, number: int) -> None:
    """Ask for /health a thousand times, and read nothing."""
    with target.connected(reads=False) as sock:
        data = target.head("GET /health", has_token=False) * 1000
        with suppress(TimeoutError):
            sock.sendall(data)
        target.hold(sock)


def idle(target: Target, number: int) -> None:
    """Connect, and say nothing."""
    with target.connected() as sock:
        target.hold(sock)


def wrong_codes(target: Target, number: int) -> None:
    """Try codes."""
    body = b'{"code": "AAAA-BBBB-CCCC"}'
    head = target.head(
        "POST /invites/redeem",
        has_token=False,
        content_type="application/json",
        content_length=len(body),
    )
    with target.connected() as sock:
        while not target.is_over:
            sock.sendall(head + body)
            sock.recv(2**16)
            time.sleep(1 / PER_S)


def slow_uploads(target: Target, number: int) -> None:
    """Send a joining of 4 MB at 1 KiB/s: it proves nothing before it was read."""
    head = target.head(
        f"POST /islands/slow-{number % 10}",
        content_type="application/json",
        content_length=4_000_000,
    )
    with target.connected() as sock:
        sock.sendall(head + b"{")
        while not target.is_over:
            sock.sendall(b" " * TRICKLE_BYTES)
            time.sleep(TRICKLE_S)


def unread_states(target: Target, number: int) -> None:
    """Ask for the weights, and read nothing."""
    with target.connected(reads=False) as sock:
        sock.sendall(target.head("GET /state/0"))
        target.hold(sock)


def slow_foundings(target: Target, number: int) -> None:
    """Promise all weights as a member of the run, and bring one byte of them.

    More than the weights take would be refused by the head alone.
    """
    identity, proof = joined(target, number % MEMBERS["slow-foundings"])
    head = target.head(
        f"POST /anchor?island={identity.island}&incarnation={identity.incarnation}",
        atoll_island_proof=proof,
        content_type=BodyKind.FRAMES.value,
        content_length=4 * ELEMENTS,
    )
    with target.connected() as sock:
        sock.sendall(head + b"A")
        target.hold(sock)


@cache
def joined(target: Target, number: int) -> tuple[Identity, str]:
    """Join, and return the new life with its proof."""
    call = joining(number, ELEMENTS)
    with target.line() as line:
        reply = line.call(call)
    assert isinstance(reply, JoinReply)
    identity = Identity(reply.island, reply.incarnation)
    return identity, proof_text(identity, blake3_digest(call.key), run=reply.run)


def long_polls(target: Target, number: int) -> None:
    """Ask for an outcome that is far away, and leave."""
    head = target.head("GET /fragments/0/rounds/1000000/outcome?wait_s=60")
    while not target.is_over:
        with target.connected() as sock:
            sock.sendall(head)
            time.sleep(1 / PER_S)


def many_names(target: Target, number: int) -> None:
    """Join under one new name after the other."""
    name = number
    with target.line() as line:
        while not target.is_over:
            with suppress(AtollError):
                line.call(joining(name, ELEMENTS))
            name += NUM_CONNECTIONS
            time.sleep(1 / PER_S)


ATTACKS: Mapping[str, tuple[str, Callable[[Target, int], None]]] = {
    "slow-uploads": ("uploads at 1 KiB/s", slow_uploads),
    "unread-states": ("downloads that are not read", unread_states),
    "slow-foundings": ("weights promised, one byte brought", slow_foundings),
    "many-names": ("names joined by the hundred", many_names),
    "long-polls": ("long polls left behind", long_polls),
    "pipelined": ("pipelined requests, never read", pipelined),
    "idle": ("idle connections", idle),
    "wrong-codes": ("wrong invitation codes", wrong_codes),
}


MEMBERS = {"slow-foundings": 10}
"""The islands that join before an attack begins, because it needs their proofs."""


def attack(name: str, target: Target) -> None:
    """Attack with all connections; each begins again when it is ended."""
    _, act = ATTACKS[name]

    def again(number: int) -> None:
        while not target.is_over:
            with suppress(OSError):
                act(target, number)
            time.sleep(1 / PER_S)

    threads = [
        threading.Thread(target=again, args=[number], daemon=True)
        for number in range(NUM_CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, target.until_s + TIMEOUT_S - time.monotonic()))


@contextmanager
def attacked(served: Served, name: str, seconds: float) -> Iterator[None]:
    """Have another process attack while the block lasts."""
    host, port = served.address
    assert host == "127.0.0.1"
    command = [sys.executable, __file__, "--attack", name, "--seconds", str(seconds)]
    command += ["--port", str(port), "--directory", str(served.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


# The comparison.


def measure(name: str, seconds: float) -> Figures:
    """Have the honest island train beside one attack, or beside none."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), settings()) as served,
        served.line() as line,
    ):
        island = Island.found(line, ELEMENTS)
        island.train(1.0)  # loads what is loaded once
        if name == QUIET:
            return island.train(seconds)
        with attacked(served, name, 2 * seconds + SETTLING_S):
            if name in MEMBERS:
                island.train(1.0)  # one round waits for the new members: not measured
            figures = island.train(seconds)
        figures.shed = served.status()["connections"]["shed"]
        return figures


def settings() -> Settings:
    """Return a run that one island takes on."""
    return {
        "run": {"name": "attacked", "start_islands": 1, "quorum": 1},
        "sync": {"sync_every": 10},
        "wire": {"up": "bf16", "down": "bf16"},
    }


def tell(what: str, figures: Figures, quiet: Figures) -> None:
    """Print one line."""
    median, p99 = figures.ms(50), figures.ms(99)
    ratios = f"{median / quiet.ms(50):7.2f} {p99 / quiet.ms(99):7.2f}"
    shed = ", ".join(f"{count} {why}" for why, count in figures.shed.items() if count)
    print(
        f"{what:34} {len(figures.latencies_s):6} {median:8.1f} {p99:8.1f} {ratios} "
        f"{figures.missed:6}  {shed}",
        flush=True,
    )


def main() -> None:
    """Print the table; or, in a process of its own, attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS}
    parser.add_argument("--attack", choices=ATTACKS, **hidden)
    parser.add_argument("--port", type=int, **hidden)
    parser.add_argument("--directory", type=Path, **hidden)
    given = parse(parser, seconds=1.0, only=["idle", "wrong-codes"])
    if given.attack:
        until_s = time.monotonic() + given.seconds
        target = Target(("127.0.0.1", given.port), given.directory, until_s)
        for number in range(MEMBERS.get(given.attack, 0)):
            joined(target, number)
        print("begins", flush=True)
        attack(given.attack, target)
        return
    print(
        f"{ELEMENTS} parameters, {NUM_CONNECTIONS} connections, "
        f"{given.seconds:g} s each\n"
    )
    columns = f"{'rounds':>6} {'p50 ms':>8} {'p99 ms':>8} {'ratio':>7} {'ratio':>7}"
    print(f"{'':34} {columns} {'missed':>6}  shed")
    quiet = measure(QUIET, given.seconds)
    tell(QUIET, quiet, quiet)
    for name in given.only:
        tell(ATTACKS[name][0], measure(name, given.seconds), quiet)


if __name__ == "__main__":
    main()
