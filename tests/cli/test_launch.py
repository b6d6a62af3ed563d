"""Islands launched by one command, and found, read, scaled and ended by others."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import typer

from atoll.cli import launch_coordinator, load_command
from atoll.cli.launch import _follow, size_bytes
from atoll.cli.launch_coordinator import RunTarget, wait_until_serving
from atoll.cli.launches import LaunchFollower, listed_reports
from atoll.errors import UsageError
from atoll.launch import IslandSpec, engines
from atoll.launch.api import Launched, launch_spec
from atoll.launch.base import Report, State
from atoll.launch.launches import LaunchRecords, Record
from atoll.settings import RunSettings
from tests.cli.runs import ISLAND, RUN_FILE, as_user, run, started
from tests.launch.faltering import Deaf, Faltering

WAIT_S = 250.0
PAGE = Path(__file__).parents[2] / "docs" / "launching.md"
COMMANDS = re.findall(r"^    atoll (.*)$", PAGE.read_text(), flags=re.MULTILINE)

STAYING = ("sh", "-c", "trap 'sleep 1; exit' TERM; while true; do sleep 0.1; done")

TELLING = """
import pathlib
for name in ("cmdline", "environ"):
    said = pathlib.Path(f"/proc/self/{name}").read_bytes()
    pathlib.Path(f"{os.environ['ATOLL_ISLAND']}.{name}").write_bytes(said)
"""

LATE = """
import atexit, os, pathlib, time
if os.environ["ATOLL_ISLAND_INDEX"] == "0":
    atexit.register(pathlib.Path("over").touch)
else:
    while not pathlib.Path("over").exists():
        time.sleep(0.1)
    time.sleep(8)  # longer than what takes a glance at the end
"""


Say = Callable[..., tuple[int, str, str]]
"""Says a command here, as this user."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run file and a script, where this user is."""
    head, rest = ISLAND.split("\n", 2)[1:]
    (tmp_path / "train.py").write_text(f"{head}\n{TELLING}\n{rest}")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    as_user(monkeypatch, tmp_path / "home", OMP_NUM_THREADS="1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def say(place: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """The command line, after which nothing is left running."""
    yield partial(run, capsys)
    for record in LaunchRecords().records():
        Launched(record.handle).cancel(grace_s=0.0)


def states(say: Say, *words: str) -> dict[str, str]:
    """Return what `atoll ps` knows of islands."""
    code, out, err = say("ps", "--json", *words)
    assert code == 0, err
    return {
        island["name"]: island["state"]
        for each in json.loads(out)
        for island in each["islands"]
    }


@pytest.mark.timeout(300)
def test_a_run_file_is_trained_to_its_end(place: Path, say: Say) -> None:
    """A coordinator and islands come and go; what is left is a table, and no settings.

    Neither the words nor the environment of an island has a setting of the run, a
    token, or a key; and start_islands is that of the file.
    """
    words = ("-n", "2", "run.toml", "--", "python", "train.py", "--mine", "7")
    code, out, err = say("launch", *words)

    assert code == 0, err
    assert "local-0 | local-0 " in out
    assert "ended  round 4 of 4" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("local-")]
    assert [row[:2] for row in rows[-2:]] == [
        ["local-0", "finished"],
        ["local-1", "finished"],
    ]
    assert states(say) == {}
    assert set(states(say, "--all").values()) <= {"finished", "cancelled"}
    _require_nothing_told(place)


def _require_nothing_told(place: Path) -> None:
    settings = RunSettings.from_toml(place / "run.toml").to_dict()
    keys = {key for table in settings.values() for key in table if "_" in key}
    secrets = [path.read_text().strip() for path in (place).rglob("*.token")]
    secrets += [path.read_bytes().hex() for path in (place / "home").rglob("*.key")]
    assert len(secrets) == 4
    for index in (0, 1):
        words = (place / f"local-{index}.cmdline").read_text().split("\0")
        said = (place / f"local-{index}.environ").read_text()
        ours = {
            each.partition("=")[0]
            for each in said.split("\0")
            if each.startswith("ATOLL_")
        }
        assert words[1:] == ["train.py", "--mine", "7", ""]
        assert ours == {"ATOLL_RUN", "ATOLL_ISLAND", "ATOLL_ISLAND_INDEX"}
        assert [key for key in keys if key in said.lower()] == []
        assert [each for each in secrets if each in said] == []


@pytest.mark.timeout(300)
def test_a_launch_is_found_from_another_terminal(place: Path, say: Say) -> None:
    """Left, listed, read, made larger and smaller, and ended, coordinator last."""
    forever = ("--set", "run.end_rounds=1000000", "--set", "run.start_islands=1")
    words = ("--detach", "-n", "2", "run.toml", *forever, "--", "train.py")
    code, out, err = say("launch", *words)
    assert code == 0, err
    url = out.split()[3]
    assert states(say, url) == {
        "coordinator-0": "running",
        "local-0": "running",
        "local-1": "running",
    }

    code, out, err = say("scale", url, "3")
    assert (code, out) == (0, "launched: local-2\n"), err
    assert states(say, "lagoon.atoll")["local-2"] == "running"
    code, out, err = say("scale", "lagoon", "1", "--json")
    assert code == 0, err
    changes = json.loads(out)
    assert (sorted(changes["leaving"]), changes["launched"]) == (
        ["local-1", "local-2"],
        [],
    )
    _until(say, url, {"local-0": "running", "local-1": "cancelled"})

    code, out, err = say("logs", url, "coordinator-0")
    assert (code, json.loads(out)["url"]) == (0, url), err
    code, _, err = say("logs", url, "lokal-0")
    assert code == 2
    assert "Did you mean 'local-0'?" in err

    code, out, err = say("launch", "-n", "1", url, "--", "train.py")
    assert code == 2
    assert f"local-0 of {url} are launched already" in err

    code, out, err = say("cancel", url, "--json")
    assert code == 0, err
    islands = [row for launch in json.loads(out) for row in launch["islands"]]
    assert {row["state"] for row in islands} == {"cancelled"}
    assert set(states(say, url).values()) == {"cancelled"}
    code, out, err = say("scale", url, "2")
    assert (code, out) == (2, "")
    assert "is no longer served" in err


@pytest.mark.timeout(300)
def test_who_comes_after_the_end_is_told_of_it(place: Path, say: Say) -> None:
    """An island that is started again may be late: it finishes, and shows no error."""
    late = LATE + (place / "train.py").read_text()
    (place / "train.py").write_text(late)
    alone = ("--set", "run.start_islands=1", "--set", "run.quorum=1")
    code, out, err = say("launch", "-n", "2", *alone, "run.toml", "--", "train.py")

    assert code == 0, err
    rows = [line.split() for line in out.splitlines() if line.startswith("local-")]
    assert [row[:3] for row in rows[-2:]] == [
        ["local-0", "finished", "0"],
        ["local-1", "finished", "0"],
    ]
    assert "Traceback" not in out


def _until(say: Say, run: str, wanted: dict[str, str]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not wanted.items() <= (found := states(say, run)).items():
        assert time.monotonic() < until_s, found
        time.sleep(0.1)


@pytest.mark.timeout(300)
def test_islands_of_a_bucket_need_no_coordinator(place: Path, say: Say) -> None:
    """A run in a store is trained as it is, and nothing else is started."""
    store = place / "store"
    code, _, err = say("init", store, place / "run.toml")
    assert code == 0, err
    words = ("-n", "2", str(store), "--", "train.py")
    code, out, err = say("launch", *words)

    assert code == 0, err
    assert "ended  round 4" in out
    assert set(states(say, "--all")) == {"local-0", "local-1"}


@pytest.mark.timeout(300)
def test_code_is_shipped_by_the_run(
    place: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Islands run what was there when they were launched, fetched by its digest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    (place / "lib").mkdir()
    (place / "lib" / "said.py").write_text("WORD = 'shipped'\n")
    (place / "main.py").write_text(
        "from lib.said import WORD\nimport os\nprint(WORD, os.getcwd())\n"
        "exec(open('train.py').read())\n"
    )
    words = ("--ship", "-n", "2", "run.toml", "--", "main.py")
    code, out, err = say("launch", *words)

    assert code == 0, err
    (digest,) = (path.name for path in (place / "lagoon.atoll" / "code").iterdir())
    assert f"local-0 | shipped {place}/cache/atoll/code/{digest}/local-0" in out
    assert not (place / "local-0.cmdline").exists()


@pytest.mark.timeout(300)
def test_failures_are_told_by_cause(place: Path, say: Say) -> None:
    """Exit code 1, what was the matter, and the last words: once for equal ones."""
    (place / "broken.py").write_text("print('so far')\nraise RuntimeError('oh dear')\n")
    words = ("-n", "2", "run.toml", "--restarts", "0", "--", "broken.py")
    code, _, err = say("launch", *words)

    assert code == 1
    assert "local-0, local-1 failed: exit code 1" in err
    assert err.count("RuntimeError: oh dear") == 1
    assert "local-1: as local-0" in err
    assert states(say) == {}


@pytest.mark.timeout(300)
def test_an_interruption_lets_islands_leave(place: Path, say: Say) -> None:
    """Ctrl-C: they leave the run, the coordinator closes, and nothing is left."""
    forever = ("--set", "run.end_rounds=1000000")
    words = ("-n", "2", "run.toml", *forever, "--", "train.py")
    process = started("launch", *words, home=place / "home", cwd=place)
    assert process.stdout is not None
    said = ""
    while "local-1 is running" not in said:
        line = process.stdout.readline()
        assert line, process.communicate()
        said += line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    code = process.returncode

    assert code == 130, err
    assert "islands are leaving" in out
    assert states(say) == {}
    found = states(say, "--all")
    assert {found["local-0"], found["local-1"]} == {"cancelled"}


def test_who_goes_without_the_islands_is_told_what_ends_all(
    say: Say, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name of the run, so that its coordinator does not stay behind."""
    spec = IslandSpec(command=("sleep", "600"), run="/no/a run", name="a")
    launched = launch_spec("local", 1, spec)

    def interrupted(following: LaunchFollower) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(LaunchFollower, "follow", interrupted)
    with pytest.raises(typer.Exit):
        _follow(launched, RunTarget("/no/a run"))

    assert "atoll cancel '/no/a run'\n" in capsys.readouterr().err


def test_what_can_be_ended_is_ended(place: Path, say: Say) -> None:
    """An engine that fails is told with its launch; the other launches are gone."""
    run = str(place / "none")
    spec = IslandSpec(command=("sleep", "600"), run=run, name="a")
    launch_spec("local", 1, spec)
    near = launch_spec("local", 1, replace(spec, name="b"))
    away = replace(near.handle, id="atoll-c-0", name="c", engine="slrm")
    LaunchRecords().keep(Record(replace(away, begun_at_s=1.0), replace(spec, name="c")))
    code, _, err = say("cancel", run, "--grace-s", "5")
    LaunchRecords().forget(away.id)

    assert code == 3
    assert "atoll-c-0 on slrm: There is no engine 'slrm'" in err
    assert "1 of 3 launches could not be ended" in err
    assert f"atoll cancel {run}" in err
    assert set(states(say, run).values()) == {"cancelled"}


def test_an_engine_that_falters_is_asked_again(
    say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    """Islands of a day's training are not left by one answer that did not come.

    Nor is their coordinator, which is let go when they are over.
    """
    words = ("sh", "-c", "echo here; sleep 2")
    spec = IslandSpec(command=words, run="/no/run", name="a")
    islands, other = (
        Launched(each.handle, Faltering(each.launcher))
        for each in (
            launch_spec("local", 1, spec),
            launch_spec("local", 1, replace(spec, command=STAYING, name="c")),
        )
    )
    LaunchFollower(islands, other).follow()
    out = capsys.readouterr().out

    assert "atoll: It is away. Retrying." in out
    assert out.count("a-0 | here") == 1
    assert "a-0 is finished" in out
    assert all(each.state.is_over for each in Launched(other.handle).poll())


def test_a_coordinator_that_starts_is_heard_past_a_silence(
    say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    """One answer that did not come ends no launch for which an image was fetched."""
    words = ("sh", "-c", 'sleep 1; echo \'{"url": "there"}\'; sleep 60')
    spec = IslandSpec(command=words, run="/no/run", name="coordinator")
    launched = launch_spec("local", 1, spec)
    facts = wait_until_serving(Launched(launched.handle, Faltering(launched.launcher)))
    launched.cancel()

    assert facts == {"url": "there"}
    assert "atoll: It is away. Retrying." in capsys.readouterr().err


def test_a_coordinator_that_stays_is_named(
    say: Say, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever followed a run does not stand before an engine that ends nothing."""
    monkeypatch.setattr(launch_coordinator, "ENDS_S", 0.0)
    spec = IslandSpec(command=("true",), run="/no/run", name="a")
    islands = launch_spec("local", 1, spec)
    staying = launch_spec("local", 1, replace(spec, command=STAYING, name="c"))
    LaunchFollower(islands, Launched(staying.handle, Deaf(staying.launcher))).follow()
    staying.cancel()

    told = f"{staying.handle.id} is cancelled on local, and still runs."
    assert told in capsys.readouterr().out


def test_a_log_is_followed_past_a_silence(
    place: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine does not tell now it tells later; a silence is told once."""
    (place / "faltering.py").write_text(
        "from tests.launch.faltering import open_launcher as open_launcher\n"
    )
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(place)])
    importlib.invalidate_caches()
    words = ("sh", "-c", "echo one; sleep 2; echo two; sleep 2")
    spec = IslandSpec(command=words, run="/no/run", name="a")
    handle = launch_spec("local", 1, spec).handle
    LaunchRecords().keep(Record(replace(handle, engine="faltering"), spec))
    code, out, err = say("logs", handle.id, "--follow")
    LaunchRecords().keep(Record(handle, spec))
    del sys.modules["atoll.launch.engines.faltering"]

    assert (code, out) == (0, "one\ntwo\n"), err
    assert set(err.splitlines()) == {"atoll: It is away. Retrying."}


def test_a_dry_run_starts_nothing(place: Path, say: Say) -> None:
    """What would be done is printed as data, and no run is begun."""
    words = ("--dry-run", "-n", "2", "--env", "A=b", "run.toml", "--", "train.py")
    code, out, err = say("launch", *words)

    assert code == 0, err
    first, second = json.loads(out)
    assert first["words"][1:] == second["words"][1:] == ["train.py"]
    assert first["environment"]["A"] == "b"
    assert second["island"] == "local-1"
    assert not (place / "lagoon.atoll").exists()
    assert states(say, "--all") == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--on", "locl", "run.toml", "--", "train.py"), "Did you mean 'local'?"),
        (("run.toml", "--", "no.py"), "no script 'no.py'"),
        (("run.toml", "--", "no-such-program"), "'no-such-program' cannot be run"),
        (("no.toml", "--", "train.py"), "'no.toml' cannot be read"),
        (("nowhere", "--", "train.py"), "'nowhere' is no URL of a run"),
        (("run.toml", "--env", "A", "--", "train.py"), "--env takes KEY=VALUE"),
        (
            ("run.toml", "--env", "MY_TOKEN=hush", "--", "train.py"),
            "--secret MY_TOKEN=env:MY_TOKEN",
        ),
        (("run.toml", "--secret", "A=hush", "--", "train.py"), "no reference"),
        (("run.toml", "--cpus", "4096", "--", "train.py"), "cpus=4096 is more"),
        (("run.toml", "--memory", "much", "--", "train.py"), "'much' is no size"),
        (("run.toml", "--option", "a=b", "--", "train.py"), "local has no option 'a'"),
        (
            ("./no-such-store", "--dir", "a", "--", "train.py"),
            "--dir and --set are for a run file",
        ),
        (
            ("./no-such-store", "--", "train.py"),
            "There is no run at",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused(
    words: tuple[str, ...], message: str, place: Path, say: Say
) -> None:
    """With 2, one sentence, and nothing started."""
    code, _, err = say("launch", *words)

    assert code == 2
    assert message in err
    assert "hush" not in err
    assert {path.name for path in place.iterdir()} == {"train.py", "run.toml"}


def test_more_lines_than_were_said_are_all_of_them(tmp_path: Path, say: Say) -> None:
    """`--last` takes as many as there are, and none of 0."""
    run = str(tmp_path / "none")
    words = ("sh", "-c", "echo one; echo two; echo three")
    spec = IslandSpec(command=words, run=run, name="a")
    launched = launch_spec("local", 1, spec)
    launched.wait(60.0)
    for last, told in (("5", "one\ntwo\nthree\n"), ("2", "two\nthree\n"), ("0", "")):
        code, out, err = say("logs", launched.handle.id, "--last", last)
        assert (code, out) == (0, told), err


def test_nothing_that_was_launched_is_told(say: Say) -> None:
    """Who asks for launches that are not there learns what there is."""
    for words in (("ps",), ("logs",), ("cancel",), ("scale",)):
        more = ("2",) if words == ("scale",) else ()
        code, _, err = say(*words, "https://127.0.0.1:9", *more)
        assert code == 2
        assert "Nothing was launched by this user for https://127.0.0.1:9" in err


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_page_is_one(line: str) -> None:
    """Verb, options and arguments are those of the command line."""
    verb, *words = shlex.split(line)
    command = load_command(verb)

    command.make_context(verb, words)


def test_every_option_of_launch_is_on_the_page() -> None:
    """The table of options is the list of options."""
    launch = load_command("launch")
    known = {
        each.opts[0] for each in launch.params if each.param_type_name == "option"
    } - {"--help", "-h"}
    rows = re.findall(r"^\| (`-.*?) \| ", PAGE.read_text(), flags=re.MULTILINE)
    listed = {option for row in rows for option in re.findall(r"`(--?[a-z-]+)", row)}

    assert listed - {"--no-ship", "-m"} == known


def test_sizes_are_read() -> None:
    """As people write them."""
    assert [size_bytes(each) for each in ("1000", "2kB", "1.5 GiB", "1T")] == [
        1000,
        2000,
        1610612736,
        10**12,
    ]
    with pytest.raises(UsageError, match="'-1' is no size"):
        size_bytes("-1")


def test_of_many_islands_those_with_trouble_are_listed() -> None:
    """A hundred islands are twelve rows, troubled ones first, and a count by state."""
    states = [State.RUNNING] * 98 + [State.FAILED, State.PENDING]
    reports = [
        Report(index=index, name=f"i{index}", state=state)
        for index, state in enumerate(states)
    ]
    listed, others = listed_reports(reports)

    assert [report.name for report in listed[:3]] == ["i98", "i99", "i0"]
    assert len(listed) == 12
    assert others == "and 88 more: 88 running"
    assert listed_reports(reports[:12]) == (reports[:12], "")
