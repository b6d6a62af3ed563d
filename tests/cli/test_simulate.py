"""`atoll simulate`: the same bytes for the same options, and errors that help."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from atoll.cli import main
from atoll.simulate import FaultPlan
from atoll.simulate.invariants import Violation
from atoll.simulate.report import Lanes, Page, closing_facts, reproduction, summary
from atoll.simulate.run import Simulated
from atoll.simulate.setup import Setup, prepare
from atoll.simulate.story import CommitTrace, IslandTally, StoryEntry

QUICKSTART = Path(__file__).parents[2] / "docs" / "quickstart.md"
CODE = "from atoll.cli import main; main()"
SMALL = ("simulate", "--islands", "3", "--rounds", "4")


def run(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str, str]:
    """Run the command line here; return its exit status and what it said."""
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def printed(*arguments: str, hash_seed: str) -> bytes:
    """Return what a process of its own prints, with other orders of its sets."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert done.stderr == b""
    return done.stdout


def facts(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> list[dict[str, Any]]:
    """Return the objects that a simulation prints as JSON."""
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_the_same_seed_gives_the_same_bytes() -> None:
    """Eight islands and fifty rounds under a storm, in two processes."""
    arguments = ("simulate", "--islands", "8", "--rounds", "50", "--seed", "7")
    first, second = (printed(*arguments, hash_seed=seed) for seed in ("1", "2"))

    assert first == second
    assert b"\x1b" not in first
    assert first.endswith(b"held      every invariant\n")


def test_every_message_is_the_same_too() -> None:
    """As JSON with everything in it, the bytes do not hang on the order of sets."""
    arguments = (*SMALL, "--seed", "3", "--storm", "3", "--all", "--json")
    first, second = (printed(*arguments, hash_seed=seed) for seed in ("1", "2"))

    assert first == second
    assert b"PublishCall" in first


def test_another_seed_is_another_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a seed it is seed 0."""
    status, out, _ = run(capsys, *SMALL)

    assert status == 0
    assert out == run(capsys, *SMALL, "--seed", "0")[1]
    assert out != run(capsys, *SMALL, "--seed", "1")[1]


def test_a_calm_run_reads_like_this(capsys: pytest.CaptureFixture[str]) -> None:
    """A heading, a timeline, lanes, a table, and what it came to."""
    status, out, err = run(capsys, *SMALL, "--faults", "none")
    heading, timeline, lanes, table, end = out.split("\n\n")
    digest = re.search(r"anchor    (\w{32}), on 3 islands that saw the end", end)

    assert (status, err) == (0, "")
    assert heading.splitlines() == [
        "islands   3, i0 to i2, quorum 1",
        "rounds    4, in 2 fragments; 12 inner steps each, overlap 2",
        "seed      0",
        "faults    none",
        "marks     # counted   ~ late   ! refused   . absent"
        "   (one per island, in order)",
    ]
    assert "  0:03  rounds 1-4   ###  all 3 counted; 8 outcomes until" in timeline
    assert "  3 islands    leave: " in timeline.splitlines()[-1]
    # 4 rounds of 2 fragments.
    assert lanes.splitlines() == [
        "lanes        one mark for a round; x died   z stood still",
        "i0           ########",
        "i1           ########",
        "i2           ########",
        "coordinator  --------",
    ]
    assert digest is not None
    assert [row.split()[1:6] + row.split()[-2:] for row in table.splitlines()[1:]] == [
        ["8", "0", "0", "0", "0", "0", digest[1][:8]]
    ] * 3
    assert "rounds    4 of 4, in every fragment" in end
    assert "kB received" in table


def test_on_a_narrow_page_the_table_has_fewer_columns() -> None:
    """The bytes go first, so that no line is wider than 80."""
    setup, result, tallies = violated()
    page = Page(setup.islands, setup.rounds, width=80)
    lines = [line.text for line in summary(setup, page, result, tallies)]

    assert max(map(len, lines)) <= 80
    assert "kB" not in lines[0]
    assert "utilised" in lines[0]


def commit(number: int, **verdicts: str) -> StoryEntry:
    """Return the entry of a committed round."""
    return StoryEntry(1.0, "run", "commit", "", commit=CommitTrace(0, number, verdicts))


def lanes_of(islands: list[str], *entries: StoryEntry, width: int = 60) -> list[str]:
    """Return the text of lanes without a coordinator."""
    lanes = Lanes(islands, has_coordinator=False)
    for entry in entries:
        lanes.add(entry)
    return [line.text for line in lanes.lines(width)]


def test_a_lane_shows_when_an_island_suffered() -> None:
    """A death or a standstill takes the place of the next round's mark."""
    _, first, second = lanes_of(
        ["i0", "i1"],
        commit(1, i0="counted", i1="late"),
        StoryEntry(1.5, "i1", "crash", "crashes"),
        commit(2, i0="counted"),
        commit(3, i0="refused"),
        StoryEntry(1.5, "i0", "freeze", "stands still"),
    )

    assert first == "i0     ##!z"
    assert second == "i1     ~x."


def test_lanes_that_are_too_long_show_the_worst_of_neighbours() -> None:
    """Of 60 rounds in 53 cells, two are one mark."""
    entries = [commit(n, i0="late" if n == 4 else "counted") for n in range(60)]
    head, lane = lanes_of(["i0"], *entries)

    assert "one mark for 2 rounds, the worst of them" in head
    assert lane == f"i0     ##~{'#' * 27}"


def test_of_many_islands_those_with_trouble_have_lanes() -> None:
    """Of a hundred, one was late; the others are a number."""
    islands = [f"i{number}" for number in range(100)]
    verdicts = dict.fromkeys(islands, "counted")
    _, *lanes = lanes_of(islands, commit(1, **verdicts | {"i7": "late"}))

    assert lanes == ["i7     ~", "and 99 more islands"]


def test_a_quiet_simulation_has_no_timeline(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Heading, lanes, table and verdict; nothing is left out of --all or --json."""
    _, out, _ = run(capsys, *SMALL, "--quiet")
    status, _, err = run(capsys, *SMALL, "--quiet", "--json")

    assert [part.split()[0] for part in out.split("\n\n")] == [
        *("islands", "lanes", "island", "rounds"),
    ]
    assert (status, "--quiet" in err) == (2, True)


def test_json_is_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The setup first, then what happened in order, and the summary last."""
    first, *happened, last = facts(capsys, *SMALL, "--seed", "2")
    commits = [each for each in happened if each["what"] == "commit"]

    assert (first["what"], first["seed"], first["rounds"]) == ("setup", 2, 4)
    assert first["settings"]["run"]["end_rounds"] == 4
    assert [each["at_s"] for each in happened] == sorted(e["at_s"] for e in happened)
    assert sorted((each["fragment"], each["round"]) for each in commits) == [
        (fragment, round) for fragment in (0, 1) for round in (1, 2, 3, 4)
    ]
    assert (last["what"], last["rounds"], last["violations"]) == ("summary", [4, 4], [])
    for island in first["islands"]:
        verdicts = [each["roster"].get(island) for each in commits]
        assert last["islands"][island]["counted"] == verdicts.count("counted")


def test_a_plan_and_a_run_file_are_followed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Faults happen when the plan says, in a run with the file's settings."""
    plan = FaultPlan().kill("i1", at_round=2, back_after_s=4.0)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    (tmp_path / "run.toml").write_text(
        "[run]\nstart_islands = 5\nend_rounds = 3\n[sync]\nsync_every = 10\n"
    )
    first, *happened, last = facts(
        capsys,
        *("simulate", tmp_path / "run.toml", "--faults", tmp_path / "plan.toml"),
        *("--set", "wire.up=int8"),
    )
    (crash,) = [each for each in happened if each["what"] == "crash"]
    commits = [each["at_s"] for each in happened if each["what"] == "commit"]

    assert (len(first["islands"]), first["rounds"]) == (5, 3)
    assert first["settings"]["wire"]["up"] == "int8"
    assert first["faults"] == [
        {"kind": "kill", "process": "i1", "at_round": 2, "back_after_s": 4.0}
    ]
    assert crash["who"] == "i1"
    assert crash["at_s"] in commits[:2]
    assert crash["text"] == "crashes, to be back in 4 s"
    assert last["islands"]["i1"]["deaths"] == 1


def test_the_quickstart_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its plan is read as it stands, and its lines are lines of the output."""
    text = QUICKSTART.read_text()
    (lines,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    plan = re.search(r"^    \[\[fault\]\].*?(?=^\S)", text, flags=re.M | re.DOTALL)
    assert plan is not None
    (tmp_path / "storm.toml").write_text(dedent(plan[0]))

    status, out, _ = run(
        capsys, "simulate", "--rounds", "12", "--faults", tmp_path / "storm.toml"
    )

    assert status == 0
    assert lines in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--islands", "0"], "'--islands'"),
        (["--islands", "100000"], "'--islands'"),
        (["--rounds", "-1"], "'--rounds'"),
        (["--rounds", "9" * 30], "'--rounds'"),
        (["--seed", "-1"], "'--seed'"),
        (["--storm", "0"], "'--storm'"),
        (["--storm", "nan"], "'--storm'"),
        (["--rounds", "2000"], "2000 rounds of 12 inner steps take 12000 s"),
        (["gone.toml"], "The run file 'gone.toml' cannot be read"),
        (["--faults", "gone.toml"], "The fault plan 'gone.toml' cannot be read"),
        (["--faults", "none", "--storm", "2"], "exclude each other"),
        (["--set", "sync.sync_evry=5"], "Did you mean 'sync.sync_every'?"),
        (["--set", "run.quorum=9"], "run.quorum=9 exceeds --islands 4"),
        (["--islands", "3", "--set", "run.start_islands=4"], "run.start_islands=4"),
        (
            ["--set", "run.start_islands=2", "--set", "run.max_islands=2"],
            "--islands 4 exceeds run.max_islands=2",
        ),
        (["--set", "sync.num_fragments=9"], "The simulated model cannot be split"),
    ],
)
def test_options_that_do_not_fit_are_misuse(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Status 2, the reason on standard error, and nothing simulated."""
    status, out, err = run(capsys, "simulate", *arguments)

    assert (status, out) == (2, "")
    assert message in err


def test_a_plan_that_names_nobody_is_misuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The fault and the nearest name are told before anything is printed."""
    path = tmp_path / "plan.toml"
    path.write_text(FaultPlan().kill("i0", at_s=1).kill("i9", at_s=1).to_toml())
    status, out, err = run(capsys, *SMALL, "--faults", path)

    assert (status, out) == (2, "")
    assert "Fault 2 of the plan, a kill, names 'i9'" in err
    assert "processes are i0 to i2 and 'coordinator'. Did you mean 'i" in err


def test_a_setting_that_costs_something_is_said_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A warning is one line, and the run goes on."""
    status, _, err = run(
        capsys, *SMALL, "--faults", "none", "--set", "wire.up=topk-2bit"
    )

    assert status == 0
    assert err.startswith("atoll: wire.up='topk-2bit' with outer.momentum=0.9 diverged")


def test_what_is_missing_is_named() -> None:
    """Without greenlet the command says what to install, and the others work."""
    code = f"import sys; sys.modules['greenlet'] = None; {CODE}"
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate"], capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert 'pip install "atoll[simulate]"' in done.stderr


def test_importing_the_command_line_does_not_load_the_simulator() -> None:
    """Who inspects a frame does not wait for islands to be loaded."""
    code = "import sys, atoll.cli; print('atoll.simulate' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.stdout == "False\n"


def violated() -> tuple[Setup, Simulated, dict[str, IslandTally]]:
    """Return a run that came to something that must not be."""
    setup = prepare(*(None, {}), islands=2, rounds=3, seed=4, faults="none", storm=None)
    result = Simulated(violations=[Violation(1.5, "i0", "same state", "it differs")])
    return setup, result, {island: IslandTally() for island in setup.islands}


def test_a_violation_comes_with_what_reproduces_it() -> None:
    """What was seen, the command, and a test that compiles."""
    setup, result, tallies = violated()
    page = Page(setup.islands, setup.rounds)
    text = [line.text for line in summary(setup, page, result, tallies)]
    again = [line.text for line in reproduction(setup, "atoll simulate --seed 4")]
    test = "\n".join(line[4:] for line in again[again.index("As a test:") + 1 :])

    assert text[-1] == "violated  1.500000 s, i0: same state: it differs"
    assert "    atoll simulate --seed 4" in again
    assert "simulate(settings=SETTINGS, islands=2, faults=plan, seed=4)" in test
    compile(test, "pasted", "exec")
    assert closing_facts(setup, result, tallies)["violations"] == [
        "1.500000 s, i0: same state: it differs"
    ]


def test_a_terminal_gets_colour_and_a_pipe_gets_progress() -> None:
    """Where the timeline is seen there is no progress; where it is not, there is."""
    shown = on_terminal(f"{sys.executable} -c '{CODE}' {' '.join(SMALL)}")
    hidden = on_terminal(f"{sys.executable} -c '{CODE}' {' '.join(SMALL)} >/dev/null")

    assert "\x1b[32m" in shown
    assert "round 1 of 4" not in shown
    assert "round 4 of 4" in hidden
    assert hidden.endswith("\x1b[1A\x1b[2K")


def on_terminal(command: str) -> str:
    """Return what a command of the shell shows on a terminal."""
    leader, follower = os.openpty()
    parts = []
    with subprocess.Popen(
        command, shell=True, stdin=follower, stdout=follower, stderr=follower
    ):
        os.close(follower)
        try:
            while part := os.read(leader, 65536):
                parts.append(part)
        except OSError:  # Linux says so when the last writer has gone
            pass
        finally:
            os.close(leader)
    return b"".join(parts).decode()
