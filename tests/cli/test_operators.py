"""`atoll status`, `control`, `events` and `doctor` of a run that waits for islands."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.security import Credentials, Role, parse_run_url
from atoll.testing import Link
from tests.cli.runs import (
    CODE,
    Served,
    as_user,
    atoll,
    environment,
    run,
    serving,
    started,
)

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return a run that nobody has joined."""
    with serving(tmp_path_factory.mktemp("run")) as served:
        yield served


@pytest.fixture(autouse=True)
def user(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the user who serves the run."""
    as_user(monkeypatch, served.home)


def test_status_is_the_document_or_its_page(served: Served, capsys: Said) -> None:
    """By URL, directory, name or run id it is the same run."""
    for run_ in (served.url, served.directory, "lagoon", served.said["run"]):
        code, out, _ = run(capsys, "status", run_, "--json")
        assert code == 0
        assert json.loads(out)["run"] == served.said["run"]

    code, out, _ = run(capsys, "status", "lagoon")
    assert code == 0
    assert "Waits for the first island, which brings the weights." in out


def test_an_operator_changes_what_can_change(served: Served, capsys: Said) -> None:
    """Pause, resume and set are in force at once; values are as in a run file."""
    assert run(capsys, "control", "lagoon", "pause")[0] == 0
    assert run(capsys, "control", "lagoon", "resume")[0] == 0
    words = ("run.quorum=2", "run.end_rounds=9", "outer.lr=0.5")
    code, out, _ = run(capsys, "control", "lagoon", "set", *words, "--json")
    status = json.loads(out)

    assert code == 0
    assert (status["quorum"], status["epoch"], status["last_round"]) == (2, 1, 9)
    code, out, _ = run(capsys, "events", "lagoon", "--json")
    names = [json.loads(line)["event"] for line in out.splitlines()]
    changes = [name for name in names if name != "audit"]
    assert (code, changes[-3:]) == (0, ["run_paused", "run_resumed", "epoch_set"])
    code, out, _ = run(capsys, "events", "lagoon")
    said = [line.split()[1:3] for line in out.splitlines()]
    assert ["epoch_set", "epoch=1"] in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["set"], "set needs settings"),
        (["set", "run.quorum"], "is not an assignment"),
        (["set", "run.quorums=2"], "run.quorums cannot change"),
        (["set", "sync.sync_every=9"], "sync.sync_every"),
        (["evict"], "evict needs the name of one island"),
        (["evict", "nobody"], "No island is called 'nobody'"),
        (["pause", "now"], "pause takes no arguments"),
        (["dance"], "'dance' is not one of"),
    ],
)
def test_what_cannot_be_done_is_misuse(
    capsys: Said, words: list[str], message: str
) -> None:
    """Exit code 2 and the reason, and the run is as it was."""
    code, out, err = run(capsys, "control", "lagoon", *words)

    assert (code, out) == (2, "")
    assert message in err


def test_events_are_followed(served: Served, capsys: Said) -> None:
    """--follow prints what happens while it looks on."""
    process = started("events", served.url, "--follow", "--json", home=served.home)
    assert process.stdout is not None
    with process:
        run(capsys, "control", "lagoon", "pause")
        for line in process.stdout:
            if json.loads(line)["event"] == "run_paused":
                break
        run(capsys, "control", "lagoon", "resume")
        for line in process.stdout:
            if json.loads(line)["event"] == "run_resumed":
                break
        # Not SIGINT, which whoever runs the tests in the background may ignore.
        process.terminate()

    assert process.returncode == -signal.SIGTERM


def test_a_doctor_looks_step_by_step(served: Served, capsys: Said) -> None:
    """Ten looks, each well, and exit code 0."""
    code, out, _ = run(capsys, "doctor", "lagoon", "--json")
    steps = json.loads(out)

    assert code == 0
    assert [each["step"] for each in steps] == [
        *("name", "credential", "address", "tcp", "tls", "health", "token", "clock"),
        *("round trip", "upload"),
    ]
    assert all(each["ok"] for each in steps)
    assert served.said["pin"] in steps[4]["said"]
    assert served.said["run"] in steps[6]["said"]
    code, out, _ = run(capsys, "doctor", "lagoon")
    assert [line.split()[0] for line in out.splitlines()] == ["ok"] * 10


def test_a_doctor_names_what_is_wrong(
    served: Served,
    capsys: Said,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step that fails says what to do, and its exit code is the command's."""
    wrong = tmp_path / "wrong.token"
    wrong.write_text("atoll_i_" + 43 * "x")
    wrong.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as door:
        free = door.getsockname()[1]
    monkeypatch.setenv("ATOLL_TOKEN_FILE", str(wrong))
    cases = {
        served.url: (4, "token", "needs the token of an island"),
        f"https://127.0.0.1:{free}": (3, "tcp", "does not accept"),
        "https://no-such-host.invalid:1": (3, "address", "has no address here"),
        "http://10.0.0.7:1": (2, "name", "would send the token in the open"),
    }
    for url, (expected, name, message) in cases.items():
        code, out, _ = run(capsys, "doctor", url)
        verdict, rest = out.splitlines()[-1].split(maxsplit=1)

        assert (code, verdict) == (expected, "failed"), out
        assert rest.startswith(name)
        assert message in rest


def test_a_doctor_guesses_the_way_up(
    served: Served, capsys: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a line of 16 Mbit/s it says about 2 MB/s."""
    port = parse_run_url(served.url).address.port
    with Link(("127.0.0.1", port), rate_bytes_per_s=2e6) as link:
        url = f"https://127.0.0.1:{link.address[1]}"
        Credentials(tmp_path / "atoll" / "runs").remember(
            url,
            pin=served.said["pin"],
            tokens={Role.ISLAND: served.directory / "island.token"},
        )
        as_user(monkeypatch, tmp_path)
        code, out, _ = run(capsys, "doctor", url, "--json")
    said = json.loads(out)[-1]["said"]

    assert code == 0
    assert 1.0 < float(said.split()[1]) < 3.0, said
    assert said.split()[2] == "MB/s,"


def test_a_run_without_a_token_is_misuse(capsys: Said) -> None:
    """Nobody is called without a credential, and where to get one is said."""
    url = "https://127.0.0.1:9"
    for words in (["status", url], ["export", url, "x.safetensors"]):
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, "")
        assert f"No token is known for {url}" in err


def test_an_unknown_run_is_misuse(capsys: Said, tmp_path: Path) -> None:
    """What could have been meant is listed."""
    code, _, err = run(capsys, "status", "lagon")

    assert code == 2
    assert "'lagon' is no URL of a run" in err
    assert "lagoon" in err


def test_a_closed_directory_says_how_to_open_it(tmp_path: Path) -> None:
    """A run that was closed is named with the command that serves it again."""
    with serving(tmp_path) as closed:
        closed.stop()
    by_directory = atoll("status", closed.directory, home=closed.home)
    by_name = atoll("status", "lagoon", home=closed.home)

    assert by_directory[0] == 2
    assert f"atoll serve RUN.toml --dir {closed.directory}" in by_directory[2]
    assert by_name[0] == 3
    assert "did not answer" in by_name[2]


def test_the_shell_completes_names_of_runs(served: Served) -> None:
    """A tab after `atoll status la` offers what this user has served or joined."""
    asked = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": "atoll status la"}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=environment(served.home, **asked, COMP_CWORD="2"),
        capture_output=True,
        text=True,
    )

    assert "lagoon" in done.stdout.split()
    assert served.said["run"] in done.stdout.split()


def on_terminal(served: Served, *words: str, **more: str) -> tuple[int, str]:
    """Run the command line on a terminal; return its exit status and what is seen."""
    leader, follower = os.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", CODE, *words],
        env=environment(served.home, **more),
        stdout=follower,
    )
    os.close(follower)
    shown = b""
    with suppress(OSError):  # how a terminal says that nobody writes any more
        while data := os.read(leader, 65536):
            shown += data
    os.close(leader)
    return done.wait(60), shown.decode()


@pytest.mark.parametrize(
    ("verb", "variables", "is_coloured"),
    [
        ("status", {"TERM": "xterm"}, True),
        ("doctor", {"TERM": "xterm", "NO_COLOR": ""}, True),
        ("events", {"TERM": "xterm"}, True),
        ("status", {"TERM": "xterm", "NO_COLOR": "1"}, False),
        ("doctor", {"TERM": "xterm", "NO_COLOR": "1"}, False),
        ("events", {"TERM": "dumb"}, False),
    ],
)
def test_a_terminal_gets_colour_unless_it_must_not(
    served: Served, verb: str, variables: dict[str, str], is_coloured: bool
) -> None:
    """NO_COLOR and dumb terminals are heeded; empty means unset, as its authors say."""
    code, shown = on_terminal(served, verb, served.url, **variables)

    assert code == 0
    assert ("\x1b[" in shown) == is_coloured


def test_an_interrupt_is_no_failure_of_ours(served: Served) -> None:
    """Ctrl-C ends whoever looks on, with 130 and without a word."""
    code = f"import signal; signal.signal(2, signal.default_int_handler); {CODE}"
    for words in (("status", "--watch"), ("events", "--follow")):
        process = subprocess.Popen(
            [sys.executable, "-c", code, words[0], served.url, words[1]],
            env=environment(served.home),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=60)

        assert (process.returncode, complaints) == (130, "")


def test_a_doctor_looks_at_a_directory(tmp_path: Path, capsys: Said) -> None:
    """Whose it is, what its file system can do, and how much is free."""
    code, out, _ = run(capsys, "doctor", "--dir", f"{tmp_path}/new", "--json")

    assert code == 0
    assert [each["step"] for each in json.loads(out)] == [
        "directory",
        "file system",
        "free space",
    ]
    (tmp_path / "new").chmod(0o755)
    code, out, _ = run(capsys, "doctor", "--dir", f"{tmp_path}/new")
    assert (code, "mode 755" in out) == (2, True)
    assert run(capsys, "doctor")[0] == 2


def test_a_doctor_says_that_a_file_system_will_not_do(
    tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run would begin there, and could not be safe."""

    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    code, out, _ = run(capsys, "doctor", "--dir", f"{tmp_path}")

    assert (code != 0, "cannot lock files" in out) == (True, True)
