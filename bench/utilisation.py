"""How much of their time do islands train, across 100 Mbit/s and 40 ms?

Utilisation is the time in compute over the time that passed, of an island over the
measured rounds. Compute is a stand-in of fixed duration in every inner step. The
coordinator and the islands are processes that the command line starts; each island has
a link of its own in userspace, which takes 40 ms each way. Beside them: the same run
without overlap, and data parallel, two processes that reduce bf16 gradients after every
step through one such link. Each is also run by the simulator. `late` is by how much a
step of the stand-in was longer than it should be: above a millisecond or two the
machine is busy with something else. `planned` is the figure of `atoll plan`, which
should differ from the measurement by at most five points.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import _utilisation_virtual as virtual
from _timing import parse

from atoll import RunSettings
from atoll.plan import IslandLink, Plan, Workload, data_parallel, judge
from atoll.testing import Link

RATE_BYTES_PER_S, DELAY_S = 100e6 / 8, 0.04
LINE = {"rate_bytes_per_s": RATE_BYTES_PER_S, "delay_s": DELAY_S}
ELEMENTS, BLOCKS, STEP_S = 2_000_000, 4, 0.1
SYNC_EVERY, OVERLAP_STEPS = 40, 8
WARM_UP_ROUNDS, LAST_ROUNDS = 3, 1
"""Islands begin one after the other, and kernels are compiled; and a run ends."""

VIRTUAL_ROUNDS = 60
"""So many that the founder's wait for the others weighs less than a percent."""

AT_LEAST, WITHIN, PLAN_WITHIN = 0.97, 0.02, 0.05
HERE = Path(__file__).parent
ATOLL = Path(sys.executable).with_name("atoll")


@dataclass(frozen=True, kw_only=True)
class Took:
    """What one process needed for its steps."""

    steps: int
    seconds: float
    compute_s: float
    wait_s: float
    bytes_up: float
    bytes_down: float
    """A round, or as many steps of data parallel."""

    @property
    def utilisation(self) -> float:
        return self.compute_s / self.seconds

    @property
    def late_s(self) -> float:
        """How much longer a step of the stand-in was than it should be."""
        return self.compute_s / self.steps - STEP_S


@dataclass(frozen=True)
class Figure:
    """What processes needed, and what they would in the simulator."""

    what: str
    measured: Sequence[Took]
    simulated: Sequence[float]
    planned: float
    limit: float | None = None

    def line(self) -> str:
        """Return the row of the table, by who was used least."""
        least = min(self.measured, key=lambda took: took.utilisation)
        ours, theirs = least.utilisation, min(self.simulated)
        stall, apart = least.wait_s / least.seconds, ours - theirs
        verdict = _verdict(f"within {WITHIN * 100:g}", abs(apart) <= WITHIN)
        is_planned = abs(ours - self.planned) <= PLAN_WITHIN
        plan = _verdict(f"plan within {PLAN_WITHIN * 100:g}", is_planned)
        verdict = f"{verdict}, {plan}"
        if self.limit is not None:
            held = _verdict(f">= {self.limit:.0%}", ours >= self.limit)
            verdict = f"{held}, {verdict}"
        words = f"{ours:9.1%} {theirs:9.1%} {apart * 100:+6.1f} {self.planned:8.1%}"
        words += f" {stall:6.1%}"
        bytes_ = f"{least.bytes_up / 1e6:12.2f} {least.bytes_down / 1e6:7.2f}"
        return f"{self.what:16} {words} {least.late_s * 1e3:8.1f} {bytes_}  {verdict}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="measured")
    parser.add_argument("--steps", type=int, default=60, help="of data parallel")
    given = parse(parser, rounds=1, steps=5)
    if given.smoke:
        shrink()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and leave nobody behind
    print(f"{__doc__.splitlines()[0]}\n    python {' '.join(sys.argv)}\n")
    print(f"{ELEMENTS:,} parameters in {BLOCKS} fragments, e3m0 up and int8 down;")
    print(f"inner steps of {STEP_S * 1e3:g} ms, {SYNC_EVERY} a round\n")
    columns = (
        f"{'measured':>9} {'simulated':>9} {'points':>6} {'planned':>8} "
        f"{'stall':>6} {'late ms':>8}"
    )
    print(f"{'':16} {columns} {'MB up, down a round':>20}  limits")
    for figure in measured(given.rounds, given.steps):
        print(figure.line(), flush=True)


def shrink() -> None:
    """Shrink the model, the rounds and the simulation for `--smoke`."""
    global ELEMENTS, STEP_S, SYNC_EVERY, OVERLAP_STEPS, VIRTUAL_ROUNDS
    ELEMENTS, STEP_S = 200_000, 0.05
    SYNC_EVERY, OVERLAP_STEPS, VIRTUAL_ROUNDS = 8, 2, 5


def measured(rounds: int, steps: int) -> Iterator[Figure]:
    """Yield what islands came to with overlap and without, and data parallel."""
    for overlap_steps in (OVERLAP_STEPS, 0):
        took = run_islands(settings_toml(overlap_steps, rounds), rounds)
        yield Figure(
            f"overlap {overlap_steps}" if overlap_steps else "no overlap",
            took,
            virtual.islands(
                _settings(overlap_steps), elements=ELEMENTS, step_s=STEP_S, **LINE
            ),
            planned(overlap_steps),
            AT_LEAST if overlap_steps else None,
        )
    yield Figure(
        "data parallel",
        run_ring(steps),
        [virtual.ring(elements=ELEMENTS, step_s=STEP_S, steps=steps, **LINE)],
        data_parallel(*_plan_inputs()),
    )


def planned(overlap_steps: int) -> float:
    """Return the utilisation by the model of `atoll plan`."""
    plan = Plan.of(_settings(overlap_steps))
    return judge(*_plan_inputs(), plan).utilisation


def _plan_inputs() -> tuple[Workload, IslandLink]:
    rate_bits_per_s = 8 * RATE_BYTES_PER_S
    link = IslandLink(
        up_bits_per_s=rate_bits_per_s,
        down_bits_per_s=rate_bits_per_s,
        delay_s=DELAY_S,
    )
    return Workload(parameters=ELEMENTS, steps_s=(STEP_S, STEP_S)), link


def _verdict(limit: str, holds: bool) -> str:
    return f"{limit} {'holds' if holds else 'MISSED'}"


def settings_toml(overlap_steps: int, rounds: int) -> str:
    """Return the run file."""
    return f"""
[run]
name = "utilisation"
start_islands = 2
end_rounds = {WARM_UP_ROUNDS + rounds + LAST_ROUNDS}

[sync]
sync_every = {SYNC_EVERY}
num_fragments = {BLOCKS}
overlap_steps = {overlap_steps}

[wire]
up = "e3m0"
down = "int8"

[outer]
momentum = 0.5
"""


def _settings(overlap_steps: int) -> RunSettings:
    with TemporaryDirectory() as place:
        file = Path(place) / "run.toml"
        file.write_text(settings_toml(overlap_steps, VIRTUAL_ROUNDS))
        return RunSettings.from_toml(file)


def run_islands(run_toml: str, rounds: int) -> list[Took]:
    """Return what each of two islands needed for the measured rounds."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        (place / "run.toml").write_text(run_toml)
        port = stack.enter_context(serving(place))
        islands = []
        for name in "ab":
            link = stack.enter_context(Link(("127.0.0.1", port), **LINE))
            islands.append(stack.enter_context(island(name, place, link)))
        for process in islands:
            _require_0(process)
        return [_took(place / f"{name}.json", rounds) for name in "ab"]


def _took(results: Path, rounds: int) -> Took:
    said = json.loads(results.read_text())
    first, last = said[str(WARM_UP_ROUNDS)], said[str(WARM_UP_ROUNDS + rounds)]
    return Took(
        steps=last["inner_steps"] - first["inner_steps"],
        seconds=last["at_s"] - first["at_s"],
        compute_s=last["compute_s"] - first["compute_s"],
        wait_s=last["wait_s"] - first["wait_s"],
        bytes_up=(last["bytes_up"] - first["bytes_up"]) / rounds,
        bytes_down=(last["bytes_down"] - first["bytes_down"]) / rounds,
    )


@contextmanager
def serving(place: Path) -> Iterator[int]:
    """Serve the run while the block lasts; yield the port."""
    command = ["serve", place / "run.toml", "--dir", place / "run", "--json"]
    with started(ATOLL, *command, home=place / "home") as process:
        assert process.stdout is not None
        yield int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])


@contextmanager
def island(name: str, place: Path, link: Link) -> Iterator[subprocess.Popen[str]]:
    """Run an island on what is another machine to it, at the other end of a link."""
    script = [sys.executable, HERE / "_utilisation_island.py"]
    script += ["--results", place / f"{name}.json", "--elements", ELEMENTS]
    script += ["--blocks", BLOCKS, "--step-s", STEP_S]
    joined = ("join", invited(place, link), "--island", name, "--", *script)
    with started(ATOLL, *joined, home=place / f"home-{name}") as process:
        yield process


def invited(place: Path, link: Link) -> str:
    """Return an invitation that leads across the link."""
    address = "{}:{}".format(*link.address)
    asked = ("invite", place / "run", "--address", address, "--json")
    with started(ATOLL, *asked, home=place / "home", is_quiet=True) as process:
        return str(json.loads(_require_0(process))["invite"])


def run_ring(steps: int) -> list[Took]:
    """Return what each of two sides of data parallel needed for so many steps."""
    script = [sys.executable, HERE / "_utilisation_ring.py", "--elements", ELEMENTS]
    script += ["--step-s", STEP_S, "--steps", steps]
    with started(*script) as first:
        assert first.stdout is not None
        target = ("127.0.0.1", int(first.stdout.readline()))
        with (
            Link(target, **LINE) as link,
            started(*script, "--port", link.address[1]) as second,
        ):
            said = [json.loads(_require_0(process)) for process in (second, first)]
    return [
        Took(
            steps=steps,
            wait_s=each["seconds"] - each["compute_s"],
            bytes_up=2.0 * ELEMENTS * SYNC_EVERY,
            bytes_down=2.0 * ELEMENTS * SYNC_EVERY,
            **each,
        )
        for each in said
    ]


@contextmanager
def started(
    *command: object, home: Path | None = None, is_quiet: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run a command while the block lasts, for a user with this home."""
    given = {"OMP_NUM_THREADS": "1", **({"XDG_CONFIG_HOME": str(home)} if home else {})}
    process = subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if is_quiet else None,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _require_0(process: subprocess.Popen[str]) -> str:
    """Return what a process said, when it has ended well."""
    out, err = process.communicate(timeout=600)
    if process.returncode:
        sys.exit(f"{process.args} ended with status {process.returncode}: {err}")
    return out


if __name__ == "__main__":
    main()
