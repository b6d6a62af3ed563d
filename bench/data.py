"""What does it cost that a run deals out its rows?

The peer of the first row is a plain DataLoader that shuffles the same rows. Two rows
are of an island that trains in windows: its claims, and the bytes that its rows add to
a roster. Two are of the ledger of a whole pass, shared by 64 islands. The last ones are
of four processes, one of which is killed every 20 rounds: the rows that are trained,
and beside it those of shares by number.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from _data_deaths import share_trained
from _timing import Row, medians, parse, report
from torch.utils.data import DataLoader, TensorDataset

import atoll.data
import atoll.torch
from atoll import RunSettings
from atoll.data import Ask, Claim, DataSpec, RowLedger, Spans
from atoll.exchange import MemoryRun
from atoll.wire import Roster, RosterEntry, Verdict

TOKENS = 128
BATCH, SYNC_EVERY, UNIT_ROWS = 64, 100, 1024
ISLANDS = 64
MB = 2**20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--ledger-rows", type=int, default=1_000_000_000)
    parser.add_argument("--pass-rows", type=int, default=9600)
    parser.add_argument("--turns", type=int, default=3)
    smoke = {"rows": 4096, "windows": 3, "ledger_rows": 2_000_000, "pass_rows": 1600}
    options = parse(parser, **smoke, turns=1)
    torch.set_num_threads(1)
    rows = [loader_row(options.rows, options.turns)]
    rows += window_rows(options.windows)
    rows += ledger_rows(options.ledger_rows)
    rows += death_rows(options.pass_rows, killed_every=4 if options.smoke else 20)
    report(f"{options.rows} rows of {TOKENS} tokens, batches of {BATCH}", rows)


def loader_row(count: int, turns: int) -> Row:
    """Return the row of a pass over the data, beside a plain loader's."""
    tokens = torch.randint(0, 2**15, (count, TOKENS), dtype=torch.int16)
    loader = DataLoader(TensorDataset(tokens), batch_size=BATCH, shuffle=True)

    def plain() -> None:
        for _ in loader:
            pass

    def dealt() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = MemoryRun(settings(sync_every=2**31 - 1))
        with atoll.torch.join(model, optimizer, run) as island:
            num_rows = sum(len(batch) for (batch,) in atoll.torch.shard(loader, island))
        assert num_rows == count

    seconds = medians({"ours": dealt, "peer": plain}, turns=turns)
    return Row(
        what="a pass, dealt / shuffled by its loader",
        ours_s=seconds["ours"],
        peer_s=seconds["peer"],
        ratio=seconds["ours"] / seconds["peer"],
        limit=1.03,
        at_most=True,
    )


class CountingRun(MemoryRun):
    """A run that counts claims, and the bytes of rows in its rosters."""

    num_claims = 0

    def claim(self, ask: Ask) -> Claim:
        self.num_claims += 1
        return super().claim(ask)


def window_rows(windows: int) -> list[Row]:
    """Return the rows of one island's windows: claims, and bytes in a roster."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = CountingRun(settings(sync_every=SYNC_EVERY))
    with atoll.torch.join(model, optimizer, run) as island:
        numbers = atoll.data.batches(island, rows=10_000_000, batch=BATCH)
        for _ in range(SYNC_EVERY):
            next(numbers)
            optimizer.step()
        run.num_claims = 0  # of the first window, whose length was not known
        for _ in range(windows * SYNC_EVERY):
            next(numbers)
            optimizer.step()
        claims = run.num_claims / windows
        rosters = [
            outcome.agreed.header.roster
            for number in range(2, windows + 2)
            if (outcome := run.outcome(0, number, wait_s=0.0)) is not None
        ]
    sizes = [len(roster.entries[0].spans) for roster in rosters if roster is not None]
    return [
        Row(
            what=f"claims per window of {SYNC_EVERY} steps",
            ours_s=0.0,
            peer_s=0.0,
            ratio=claims,
            limit=1.0,
            at_most=True,
        ),
        Row(
            what="bytes of rows per island and roster",
            ours_s=0.0,
            peer_s=0.0,
            ratio=float(np.mean(sizes)),
            limit=40.0,
            at_most=True,
        ),
    ]


def ledger_rows(rows: int) -> list[Row]:
    """Return the rows of a pass of 64 islands: memory of the ledger, and its time.

    Islands finish their windows in a random order, and each dies once in 500 windows.
    """
    generator = np.random.default_rng(0)
    ledger = RowLedger(unit_rows=UNIT_ROWS, passes=1, num_fragments=1)
    ledger = ledger.opened(DataSpec(rows=rows))
    largest, num_windows, start_s = 0, 0, time.perf_counter()
    numbers = dict.fromkeys([f"i{index:02}" for index in range(ISLANDS)], 0)
    in_hand = dict.fromkeys(numbers, Spans())
    want = -(-BATCH * SYNC_EVERY // UNIT_ROWS)
    while ledger.has_free or any(in_hand.values()):
        for island in generator.permutation(list(numbers)).tolist():
            if len(in_hand[island]) < BATCH * SYNC_EVERY:
                spans = ledger.chosen(want, num_live=ISLANDS)
                numbers[island] += 1
                ledger = ledger.claimed(island, numbers[island], spans)
                in_hand[island] = in_hand[island] | spans
            if generator.random() < 1 / 500:
                ledger, in_hand[island] = ledger.released(island), Spans()
                continue
            trained = in_hand[island].head(BATCH * SYNC_EVERY)
            in_hand[island] = in_hand[island] - trained
            ledger = ledger.settled(0, roster_of(island, trained))
            num_windows += 1
        largest = max(largest, size_of(ledger))
    assert ledger.counts.trained == rows
    spent_s = time.perf_counter() - start_s
    return [
        Row(
            what=f"the ledger of {rows:.0e} rows, MB",
            ours_s=0.0,
            peer_s=0.0,
            ratio=largest / MB,
            limit=16.0,
            at_most=True,
        ),
        Row(
            what="a claim and an update in it, us",
            ours_s=spent_s,
            peer_s=0.0,
            ratio=1e6 * spent_s / num_windows,
        ),
    ]


def death_rows(rows: int, *, killed_every: int) -> list[Row]:
    """Return the rows of a pass in which an island dies again and again."""
    trained = {
        order: share_trained(order, rows=rows, killed_every=killed_every)
        for order in ("run", "islands")
    }
    return [
        Row(
            what=f"trained, 1 of 4 dies every {killed_every} rounds",
            ours_s=0.0,
            peer_s=0.0,
            ratio=trained["run"],
            limit=1.0,
        ),
        Row(
            what="trained at most, with shares by number",
            ours_s=0.0,
            peer_s=0.0,
            ratio=trained["islands"],
        ),
    ]


def roster_of(island: str, spans: Spans) -> Roster:
    """Return a roster that counts an update of these rows."""
    entry = RosterEntry(
        island=island,
        incarnation=1,
        verdict=Verdict.COUNTED,
        weight=1,
        digest=bytes(32),
        spans=spans.pack(),
    )
    return Roster((entry,))


def size_of(ledger: RowLedger) -> int:
    """Return the bytes of all intervals in a ledger."""
    answered = [spans for claims in ledger.claims.values() for _, spans in claims]
    every = [ledger.free, *ledger.holdings.values(), *ledger.counted, *ledger.refused]
    return sum(16 * spans.num_spans for spans in [*every, *answered])


def settings(*, sync_every: int) -> RunSettings:
    """Return the settings of a run that deals out its rows."""
    table = {"order": "run", "unit_rows": UNIT_ROWS}
    return RunSettings.from_dict({"data": table, "sync": {"sync_every": sync_every}})


if __name__ == "__main__":
    main()
