"""One island of `store.py`, over our exchange or by the naive scheme.

    _store_island.py ours URL FOLDER NUMBER ISLANDS ELEMENTS
    _store_island.py naive URL FOLDER NUMBER ISLANDS ELEMENTS

What an island has learnt has few bits, so that a sum is exact in any order: then both
schemes have the same mean, to the bit, or one of them is wrong.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
from _round_crew import Said, attend
from _store_noted import Noted

from atoll.errors import NoSuchObject
from atoll.island import Host
from atoll.island import store_connection as meeting
from atoll.island.environment import CredentialPaths
from atoll.island.numpy_model import VectorView, vector_model
from atoll.protocol import JoinRequest
from atoll.runtime import SystemClock
from atoll.store import (
    CountedStore,
    RequestCounts,
    Store,
    open_store,
)
from atoll.weights.layout import F32
from atoll.wire import blake3_digest

TENSORS = 8
LOOKS = 2
"""Of our rounds: one list, and a question for the roster after the one just read."""

NAP_S = 0.1
"""Between two questions of the naive scheme for an object that is not there yet."""


def main() -> None:
    """Be what the first argument says."""
    what, url, folder, *sizes = sys.argv[1:]
    roles: dict[str, Callable[..., None]] = {"ours": ours, "naive": naive}
    roles[what](url, Path(folder), *map(int, sizes))


def learnt(number: int, elements: int) -> F32:
    """Return a pseudo-gradient whose values have seven bits, and so has a bf16."""
    rng = np.random.default_rng(number)
    whole = rng.integers(-127, 128, elements, np.int8)
    return whole.astype(np.float32) * np.float32(2.0**-14)


def digest_of(mean: F32) -> str:
    """Return what tells two means apart; a zero has no sign here."""
    return blake3_digest((mean + np.float32(0.0)).view(np.uint8)).hex()


class Bill:
    """What an island asks of a store, round by round."""

    def __init__(self, counted: CountedStore, noted: Noted) -> None:
        self._counted, self._noted = counted, noted
        self._before = RequestCounts()

    def take(self) -> Said:
        """Return what was asked since this was asked."""
        now, before = self._counted.requests, self._before
        spent, self._before = now.since(before), now
        return {
            "up": spent.bytes_up,
            "down": spent.bytes_down,
            "requests": spent.total,
            "usd": spent.usd,
            **self._noted.take(),
        }


def ours(url: str, folder: Path, number: int, islands: int, elements: int) -> None:
    """Join the run in the bucket, and make a round when told to."""
    taps: list[Noted] = []

    def tapped(url: str) -> Store:
        taps.append(Noted(open_store(url), needed=LOOKS))
        return taps[0]

    # `patch.object` fails if stores are opened by another name.
    mock.patch.object(meeting.store, "open_store", tapped).start()
    clock, name, view = SystemClock(), f"island-{number}", VectorView()
    places = CredentialPaths(credentials=folder / "credentials", keys=folder / "keys")
    way = meeting.connect_store(url, island=name, paths=places, clock=clock)
    sizes = {f"blocks.{each}.w": (elements // TENSORS,) for each in range(TENSORS)}
    host = Host(
        way.exchange,
        view,
        JoinRequest(model=vector_model(sizes), island=name),
        leaving=way.leaving(),
    )
    bill, gradient = Bill(way.reliable.counted, taps[0]), learnt(number, elements)

    def train() -> None:
        view.local[0] -= gradient
        bill.take()

    def make_round() -> Said:
        host.stepped()
        return bill.take()

    def tell() -> Said:
        mean, _ = host.read_anchor(0)
        return {"mean": digest_of(-mean), "digest": host.digest}

    attend({"train": train, "round": make_round, "tell": tell})
    host.leave(depart=False)


def naive(url: str, folder: Path, number: int, islands: int, elements: int) -> None:
    """Put the whole vector, read everybody's, and take the mean."""
    import torch

    torch.set_num_threads(1)
    store = CountedStore(noted := Noted(open_store(url), needed=0))
    bill, gradient = Bill(store, noted), torch.from_numpy(learnt(number, elements))
    rounds, mean = iter(range(10**6)), torch.zeros(elements)

    def read(key: str) -> torch.Tensor:
        while True:
            try:
                data = store.get(key)
            except NoSuchObject:
                time.sleep(NAP_S)
            else:
                found: torch.Tensor = torch.load(io.BytesIO(data))
                return found

    def make_round() -> Said:
        file, prefix = io.BytesIO(), f"rounds/0/{next(rounds)}/"
        mine = gradient.to(torch.bfloat16)
        torch.save(mine, file)
        store.put(f"{prefix}{number}", [file.getbuffer()])
        mean.zero_()
        for other in range(islands):
            mean.add_(mine if other == number else read(f"{prefix}{other}"))
        mean.copy_(mean.div_(islands).to(torch.bfloat16))
        return bill.take()

    def tell() -> Said:
        return {"mean": digest_of(mean.numpy()), "digest": digest_of(mean.numpy())}

    attend({"train": lambda: None, "round": make_round, "tell": tell})


if __name__ == "__main__":
    main()
