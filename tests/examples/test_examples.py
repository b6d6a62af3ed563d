"""Every example runs as a script, is short, and prints what it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import atoll
from atoll import RunSettings

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

MOST_LINES = {
    "three_lines.py": 40,
    "minimal.py": 125,
    "island.py": 40,
    "jax_island.py": 60,
    "jax_minimal.py": 80,
    "store_all_reduce.py": 40,
    "torchft_diloco.py": 60,
    "transformers_trainer.py": 40,
    "lightning_trainer.py": 40,
    "accelerate_loop.py": 40,
    "fsdp2_plain.py": 40,
    "train.py": 80,
}
"""Without blank lines."""


def run(name: str, *arguments: str) -> str:
    """Run an example as its reader would, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def row(table: str, name: str) -> tuple[float, float]:
    """Return a row of the table: islands, then data parallel."""
    found = re.search(rf"^{name} +([\d.]+) +([\d.]+)$", table, flags=re.MULTILINE)
    assert found is not None, table
    return float(found[1]), float(found[2])


def test_each_example_is_listed_and_short() -> None:
    """An example is read top to bottom, so it has a limit, and this test knows all."""
    for path in EXAMPLES.glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(lines) <= MOST_LINES[path.name], path.name


@pytest.mark.torch
def test_three_lines_end_by_themselves_with_one_model() -> None:
    """Both islands leave their endless loops at the last round with the same loss."""
    first, second = run("three_lines.py").splitlines()

    assert first == second
    # The mean of sin(x)**2 over [-3, 3] is 1/2 - sin(6)/12, about 0.52.
    assert float(first.removeprefix("loss ")) < 0.1


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_two_islands_join_a_coordinator_with_the_commands_of_the_readme(
    tmp_path: Path,
) -> None:
    """Served, joined twice, and over: all three end by themselves with status 0."""
    command = [str(Path(sys.executable).with_name("atoll"))]
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config")}
    environment["OMP_NUM_THREADS"] = "1"

    def start(*words: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *map(str, words)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    serve = ["serve", EXAMPLES / "run.toml", "--dir", tmp_path / "first"]
    coordinator = start(*map(str, serve), "--until-end", "--json")
    assert coordinator.stdout is not None
    url = json.loads(coordinator.stdout.readline())["url"]
    islands = [
        start("join", url, "--island", name, "--", EXAMPLES / "island.py")
        for name in ("north", "south")
    ]
    said = [island.communicate()[0] for island in islands]
    coordinator.communicate()

    assert [each.returncode for each in (*islands, coordinator)] == [0, 0, 0]
    assert len({line.rpartition(" ")[2] for line in said}) == 1


@pytest.mark.jax
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_torch_island_and_a_jax_island_share_a_bucket(tmp_path: Path) -> None:
    """Both examples end by themselves, in the same run and on one digest."""
    settings = {
        "run": {"start_islands": 2, "end_rounds": 3},
        "sync": {"sync_every": 20},
    }
    atoll.init(str(tmp_path / "bucket"), RunSettings.from_dict(settings))
    environment = {
        **os.environ,
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "ATOLL_RUN": str(tmp_path / "bucket"),
        "OMP_NUM_THREADS": "1",
    }
    islands = [
        subprocess.Popen(
            [sys.executable, "-W", "error", EXAMPLES / name],
            env={**environment, "ATOLL_ISLAND": name},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("island.py", "jax_island.py")
    ]
    said = [island.communicate()[0] for island in islands]

    assert [island.returncode for island in islands] == [0, 0]
    assert said[0].startswith("island.py: round 3, digest ")
    assert len({line.rpartition(" ")[2] for line in said}) == 1


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_minimal_prints_loss_and_bytes_beside_data_parallel() -> None:
    """Islands show progress; the table has loss and bytes of both, and the ratio."""
    printed = run("minimal.py", "--quick")

    sent, ring = row(printed, "MB sent per island")
    received, ring_again = row(printed, "MB received per island")
    ratio = re.search(r"Bytes: (\d+) times fewer", printed)
    # Guessing evenly among the 109 bytes that occur costs log(109) = 4.7 nats.
    assert all(0 < loss < 3.5 for loss in row(printed, "loss, nats per byte"))
    # 6 rounds of 20 inner steps and an overlap of 2 are 122 inner steps; a ring of 4
    # moves twice 1.5 fp32 gradients in each: 122 * 12 = 1464 bytes per weight. e3m0
    # takes 33/64 of a byte and int8 260/256: six rounds take 9.19, and headers.
    assert ring == ring_again
    assert ratio is not None
    assert 150 < int(ratio[1]) < 1464 / 9.19
    assert int(ratio[1]) == pytest.approx(2 * ring / (sent + received), rel=0.01)
    assert len(re.findall(r"^era-\d: round \d+, loss", printed, re.MULTILINE)) == 4
    assert re.search(r"^Digest of all islands: [0-9a-f]{32}$", printed, re.MULTILINE)


@pytest.mark.torch
def test_a_misspelt_option_is_refused() -> None:
    """Nothing that was asked for is ignored."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "minimal.py", "--quik"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "--quik" in done.stderr


@pytest.mark.torch
def test_torchft_trains_two_islands_to_one_model() -> None:
    """The class of torchft ends with the run, and both islands hold the same."""
    first, second = run("torchft_diloco.py").splitlines()

    assert first == second
    assert float(first.removeprefix("loss ")) < 0.1


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_two_ranks_of_fsdp2_are_one_island(tmp_path: Path) -> None:
    """Started as torchrun starts it, it ends with a run that lives in a directory."""
    settings = {
        "run": {"end_rounds": 3, "max_islands": 1},
        "sync": {"sync_every": 10},
        "outer": {"momentum": 0.5},
    }
    atoll.init(str(tmp_path / "run"), RunSettings.from_dict(settings))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, EXAMPLES / "fsdp2_plain.py"],
        env={
            **os.environ,
            "ATOLL_RUN": str(tmp_path / "run"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"^loss ([\d.]+), digest [0-9a-f]{32}$", done.stdout, re.M)
    assert found is not None, done.stdout
    # Guessing evenly among 32 words costs log(32) = 3.47 nats.
    assert float(found[1]) < 2.5
