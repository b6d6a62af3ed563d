"""What does a round over an object store cost, and who asks less of the store?

Every island is a process of its own, and all meet in a bucket of a real S3 on this
machine. Beside ours the naive scheme: every island puts its whole vector by
`torch.save`, and reads everybody's. Bytes and requests are those of the island that
has the most in any timed round, and have limits; seconds are printed only, for they
tell more of the machine. All islands of both schemes must come to one mean.

Then `obstore`, which our store uses, beside `s3fs` on the same calls.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _round_crew import Crew, Said, together
from _store_bucket import NO_ENGINE, bucket, has_engine
from _store_calls import tell_calls
from _timing import parse

from atoll.exchange.bucket.create import init
from atoll.exchange.bucket.means import DIRECT_ISLANDS
from atoll.settings import RunSettings
from atoll.store.client import num_ranges

SCHEMES = ("ours", "naive")
WARM_UPS = 1

OF_NAIVE_BYTES = {2: 1.01, 4: 0.72, 8: 0.45}
"""By islands. Ours moves (3n - 1) / n updates from four islands on, naive n of them."""

OF_A_ROUND, OF_AN_ISLAND = 12, 3
"""Requests, as tests/exchange/bucket/test_requests.py states them, without waits.

What is longer than a range is read by several; `further` counts those.
"""

MISSED = "MISSED"


@dataclass(frozen=True)
class Cost:
    """What a scheme costs the island that has the most of it."""

    up: int
    down: int
    requests: int
    """Without looks and heartbeats."""

    looks: int
    beats: int
    usd: float
    seconds: float
    mean: str


def main() -> int:
    """Print the tables; return 1 if a limit is missed."""
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that S3 ends, too
    if not has_engine():
        print(NO_ENGINE)
        return 0
    print(f"a round over S3, {given.elements} parameters, bf16 both ways")
    print(f"    python {' '.join(sys.argv)}\n")
    found = {
        islands: {each: measured(each, islands, given) for each in SCHEMES}
        for islands in given.islands
    }
    tell_costs(found)
    verdicts = [
        line
        for islands, costs in found.items()
        for line in judged(islands, given.elements, costs)
    ]
    print("\n" + "\n".join(verdicts) + "\n")
    with bucket(given.folder) as url:
        tell_calls(url, size_bytes=2 * given.elements, turns=given.turns)
    return int(any(MISSED in line for line in verdicts))


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=2, help="timed, of each scheme")
    parser.add_argument("--turns", type=int, default=5, help="of calls beside s3fs")
    parser.add_argument("--folder", type=Path, help="on the disk that S3 shall use")
    parser.add_argument("--quick", action="store_true", help="2M parameters, 4 islands")
    given = parse(parser, elements=1_000_000, islands=[2], rounds=1, turns=1)
    if given.quick:
        given.elements, given.islands, given.turns = 2_000_000, [4], 1
    return given


def measured(scheme: str, islands: int, given: argparse.Namespace) -> Cost:
    """Return what rounds of a scheme cost, in a bucket of its own.

    Raises:
        SystemExit: islands have come to different weights.
    """
    with (
        bucket(given.folder) as url,
        tempfile.TemporaryDirectory() as folder,
        Crew() as crew,
    ):
        if scheme == "ours":
            init(url, settings(islands))
        members = [
            crew.start(
                "_store_island.py",
                *(scheme, url, folder, number, islands, given.elements),
            )
            for number in range(islands)
        ]
        for member in members:
            member.hear()
        mean, rounds = "", []
        for _ in range(WARM_UPS + given.rounds):
            together(members, "train")
            rounds.append(together(members, "round"))
            _, told = together(members, "tell")
            require_one({each["digest"] for each in told}, scheme, islands)
            mean = mean or told[0]["mean"]
            took = f"{rounds[-1][0]:.3f} s"
            print(f"{islands} islands, {scheme}: {took}", file=sys.stderr)
    return cost_of(rounds[WARM_UPS:], mean)


def settings(islands: int) -> RunSettings:
    """Return those of a run whose first anchor is minus the first mean."""
    return RunSettings.from_dict(
        {
            "run": {"name": "bench", "start_islands": islands, "quorum": islands},
            "sync": {"sync_every": 1},
            "wire": {"up": "bf16", "down": "bf16"},
            "outer": {"optimizer": "sgd", "lr": 1.0},
        }
    )


def require_one(digests: set[str], scheme: str, islands: int) -> None:
    """Return if all have come to the same.

    Raises:
        SystemExit: they have not.
    """
    if len(digests) != 1:
        raise SystemExit(
            f"{scheme}: {islands} islands have {len(digests)} different anchors."
        )


def cost_of(rounds: list[tuple[float, list[Said]]], mean: str) -> Cost:
    """Return the most of each that an island has had in a round."""
    bills = [bill for _, bills in rounds for bill in bills]
    return Cost(
        up=max(each["up"] for each in bills),
        down=max(each["down"] for each in bills),
        requests=max(
            each["requests"] - each["looks"] - each["beats"] for each in bills
        ),
        looks=max(each["looks"] for each in bills),
        beats=max(each["beats"] for each in bills),
        usd=max(each["usd"] for each in bills),
        seconds=statistics.median(seconds for seconds, _ in rounds),
        mean=mean,
    )


def tell_costs(found: dict[int, dict[str, Cost]]) -> None:
    """Print what each scheme costs an island and round."""
    titles = ("up MB", "down MB", "requests", "looks", "beats", "USD/1000", "s")
    print(f"{'':20}" + " ".join(f"{each:>9}" for each in titles))
    for islands, costs in found.items():
        for scheme, cost in costs.items():
            cells = [f"{cost.up / 1e6:9.2f}", f"{cost.down / 1e6:9.2f}"]
            cells += [f"{cost.requests:9}", f"{cost.looks:9}", f"{cost.beats:9}"]
            cells += [f"{cost.usd * 1000:9.3f}", f"{cost.seconds:9.2f}"]
            print(f"{islands} islands, {scheme:8} " + " ".join(cells))


def further(islands: int, elements: int) -> int:
    """Return how many ranges beyond the first of each object a round reads."""
    is_direct = islands <= DIRECT_ISLANDS
    size_bytes = 2 * elements // (1 if is_direct else islands)
    others = (islands - 1) * (1 if is_direct else 2)  # updates, and means of shards
    return others * (num_ranges(size_bytes) - 1)


def judged(islands: int, elements: int, costs: dict[str, Cost]) -> Iterator[str]:
    """Yield whether what has a limit keeps it."""
    ours, naive = costs["ours"], costs["naive"]
    share = (ours.up + ours.down) / (naive.up + naive.down)
    most = OF_A_ROUND + OF_AN_ISLAND * islands + further(islands, elements)
    yield f"{islands} islands, the mean of both   {verdict(ours.mean == naive.mean)}"
    yield (
        f"{islands} islands, requests beside looks {ours.requests:6} <= {most} "
        f"{verdict(ours.requests <= most)}"
    )
    if (limit := OF_NAIVE_BYTES.get(islands)) is not None:
        yield (
            f"{islands} islands, bytes of the naive    {share:6.3f} <= {limit} "
            f"{verdict(share <= limit)}"
        )


def verdict(holds: bool) -> str:
    """Return the word for it."""
    return "holds" if holds else MISSED


if __name__ == "__main__":
    sys.exit(main())
