"""How long does a round take among ranks of one process group, and what moves?

Every rank is a process, and so is the coordinator. In turns: a round that the ranks
reduce among themselves, the same round through the coordinator, and gloo's all-reduce
of the same elements in fp32, which is only a sum: it seals, verifies, keeps and applies
nothing. A round is a whole `stepped()` of an island with one step per window. Ratios
above 1 say how many times as long the other one takes.

All of it twice: with a coordinator on the same machine, whose network costs nothing,
and with one behind a cable that its islands share.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from _timing import TURNS, Row, parse, report

from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.exchange import CollectiveRun
from atoll.island import Host
from atoll.island.connection import CollectiveConnection
from atoll.island.environment import CredentialPaths
from atoll.island.join import RunConnection
from atoll.protocol import JoinRequest
from atoll.runtime import SystemClock
from atoll.security import Role, token_file
from atoll.settings import RunSettings
from atoll.testing import Link, VectorView, vector_model

WARM_UPS = 2
COLLECTIVE, COORDINATOR, ALL_REDUCE = "collective", "coordinator", "all-reduce fp32"

FORKS = multiprocessing.get_context("forkserver")


def main() -> None:
    """Print the table, and what an island has sent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, default=1000.0, help="of the cable")
    given = parse(parser, elements=50_000, turns=1, ranks=[2])
    rows, moved = [], []
    for ranks, mbit in product(given.ranks, (None, given.mbit)):
        with tempfile.TemporaryDirectory() as folder:
            taken, said = measured(Path(folder), ranks, mbit, given)
        where = f"{mbit:g} Mbit/s" if mbit else "same machine"
        rows += [
            Row(
                what=f"{ranks} ranks, {where}, {name}",
                ours_s=taken[COLLECTIVE],
                peer_s=taken[name],
                ratio=taken[name] / taken[COLLECTIVE],
            )
            for name in (COORDINATOR, *([] if mbit else [ALL_REDUCE]))
        ]
        moved += [f"{ranks} ranks: {said}"] if mbit else []
    report(f"a round of {given.elements} elements, bf16 both ways", rows)
    print("\nin payloads, per round\n" + "\n".join(moved))


def measured(
    folder: Path, ranks: int, mbit: float | None, given: argparse.Namespace
) -> tuple[dict[str, float], str]:
    """Return the median seconds of each way, and what was moved."""
    coordinators = [_start(_serve, folder / name) for name in (COLLECTIVE, COORDINATOR)]
    rate = mbit * 1e6 / 8 if mbit else None
    with ExitStack() as stack:
        links = [
            stack.enter_context(Link(line.recv(), rate_bytes_per_s=rate))
            for _, line in coordinators
        ]
        urls = [f"http://{host}:{port}" for host, port in (x.address for x in links)]
        members = [
            _start(_be, folder, rank, ranks, urls, given.elements, given.turns)
            for rank in range(ranks)
        ]
        replies = [line.recv() for _, line in members]
        taken, up = replies[0]
        rounds, payload = given.turns + WARM_UPS, 2 * given.elements
        said = f"a rank sends {up / payload:.2f} to the others"
        for name, link in zip((COLLECTIVE, COORDINATOR), links, strict=True):
            # Its first weights, fp32 with a velocity, are no part of a round.
            founding = 4 * payload
            taken_in = (link.bytes_up - founding) / payload / rounds
            said += f"; {name}: its coordinator takes in {taken_in:.2f}"
    for _, line in (*members, *coordinators):
        line.send("end")
    for process, _ in (*members, *coordinators):
        process.join()  # then nothing writes to the folder any more
    return taken, said


def _start(
    target: Callable[..., None], *args: object
) -> tuple[ForkServerProcess, Connection]:
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    return process, here


def _serve(line: Connection, directory: Path) -> None:
    """Be a coordinator until told otherwise."""
    directory.mkdir(mode=0o700)
    settings = RunSettings.from_dict(
        {
            "run": {"start_islands": 1},
            "sync": {"sync_every": 1},
            "wire": {"up": "bf16", "down": "bf16"},
        }
    )
    coordinator = Coordinator(
        directory, settings, listening=ListenOptions(has_tls=False)
    )
    coordinator.start()
    line.send(coordinator.address)
    line.recv()
    coordinator.close()


def _be(
    line: Connection,
    folder: Path,
    rank: int,
    ranks: int,
    urls: list[str],
    elements: int,
    turns: int,
) -> None:
    """Be a rank: do each way in turns, all ranks together."""
    torch.set_num_threads(1)
    where = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    values = torch.ones(elements)
    run = CollectiveRun(urls[0], silence_s=60.0)
    hosts = {
        COLLECTIVE: _host(folder / COLLECTIVE, rank, run, elements),
        COORDINATOR: _host(folder / COORDINATOR, rank, urls[1], elements),
    }
    ways = {name: host.stepped for name, host in hosts.items()}
    ways[ALL_REDUCE] = lambda: dist.all_reduce(values)
    taken, bytes_up = defaultdict(list), 0.0
    for turn in range(turns + WARM_UPS):
        for name, act in ways.items():
            dist.barrier()
            before_up = run.costs()["atoll/collective_bytes_up"]
            begun_s = time.perf_counter()
            act()
            dist.barrier()
            if turn >= WARM_UPS:
                taken[name].append(time.perf_counter() - begun_s)
            if name == COLLECTIVE:
                bytes_up = run.costs()["atoll/collective_bytes_up"] - before_up
    line.send(({name: statistics.median(s) for name, s in taken.items()}, bytes_up))
    line.recv()  # until all is counted


def _host(directory: Path, rank: int, run: CollectiveRun | str, elements: int) -> Host:
    clock, name, own = SystemClock(), f"i{rank}", directory.parent
    around = CredentialPaths(
        credentials=own / "credentials",
        keys=own / "keys",
        token_file=token_file(directory, Role.ISLAND),
    )
    way: CollectiveConnection | RunConnection
    if isinstance(run, CollectiveRun):
        way = CollectiveConnection(run, island=name, paths=around, clock=clock)
    else:
        way = RunConnection(run, island=name, paths=around, clock=clock)
    view = VectorView(fill=0.5)
    request = JoinRequest(model=vector_model({"w": (elements,)}), island=name)
    host = Host(way.exchange, view, request, leaving=way.leaving())
    view.local[0] -= np.float32(1e-3 * (rank + 1))
    return host


if __name__ == "__main__":
    FORKS.set_forkserver_preload(["torch.distributed", "atoll.island.connection"])
    sys.path.insert(0, str(Path(__file__).parent))
    main()
