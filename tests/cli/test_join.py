"""`atoll invite` and `atoll join`: a code is used once, a command is run as it is."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runs import Served, as_user, atoll, ended, run, serving, started

SAY = "import os; print(os.environ['ATOLL_RUN'], os.environ.get('ATOLL_ISLAND'))"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return a run that nobody has joined."""
    with serving(tmp_path_factory.mktemp("run")) as served:
        yield served


def invited(served: Served) -> str:
    """Return a new invitation."""
    code, out, _ = atoll("invite", served.url, "--json", home=served.home)
    assert code == 0
    return str(json.loads(out)["invite"])


def test_a_command_is_run_as_it_is(served: Served, tmp_path: Path) -> None:
    """Its options, its environment and its exit code are its own."""
    script = tmp_path / "say.py"
    script.write_text(f"{SAY}\nimport sys; sys.exit(int(sys.argv[2]))")
    options = ("--island", "tokyo-1", "--", script, "--code", "7")
    code, out, err = atoll("join", "lagoon", *options, home=served.home)

    assert (code, out, err) == (7, f"{served.url} tokyo-1\n", "")


def test_a_signal_reaches_the_command(served: Served) -> None:
    """SIGTERM ends the command, and nobody is left behind."""
    wait = "print('here', flush=True); import signal; signal.pause()"
    process = started("join", served.url, "--", "python", "-c", wait, home=served.home)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)

    assert ended(process)[0] == -signal.SIGTERM


def test_an_invitation_is_for_one_user(served: Served, tmp_path: Path) -> None:
    """Pasted twice by one it works twice; another is refused, with exit code 4."""
    paste = invited(served)
    once = atoll("join", paste, "--", "python", "-c", SAY, home=tmp_path / "one")
    twice = atoll("join", paste, "--", "python", "-c", SAY, home=tmp_path / "one")
    named = atoll(
        *("join", served.said["run"], "--", "python", "-c", SAY), home=tmp_path / "one"
    )
    other = atoll("join", paste, "--", "python", "-c", SAY, home=tmp_path / "two")

    assert once == twice == named == (0, f"{served.url} None\n", "")
    assert other[:2] == (4, "")
    assert "This code is wrong, was used, or is older than 60 minutes" in other[2]


def test_who_was_invited_is_no_operator(
    served: Served,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An island's token shows the status, and neither stops a run nor invites."""
    as_user(monkeypatch, tmp_path)
    paste = invited(served)
    assert atoll("join", paste, "--", "true", home=tmp_path)[0] == 0

    assert run(capsys, "status", served.url)[0] == 0
    code, _, err = run(capsys, "control", served.url, "stop")
    assert code == 2
    assert "No token is known" in err
    monkeypatch.setenv("ATOLL_TOKEN_FILE", served.said["tokens"]["island"])
    code, _, err = run(capsys, "control", served.url, "stop")
    assert code == 4
    assert "needs the token of an operator" in err


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda said: said[:-4], 2, "its code has not 32 digits"),
        (lambda said: said.replace("pin=", "pin=0000", 1)[:-4], 2, "no whole invite"),
        (lambda said: said[:-1] + "xyz"[said[-1] == "0"], 2, "no whole invite"),
    ],
)
def test_a_paste_that_is_not_whole_is_misuse(
    served: Served,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: object,
    code: int,
    message: str,
) -> None:
    """What is missing is said, and nothing of the paste is repeated."""
    as_user(monkeypatch, tmp_path)
    paste = invited(served)
    assert callable(change)
    status, out, err = run(capsys, "join", change(paste), "--", "true")

    assert (status, out) == (code, "")
    assert message in err
    assert paste[-32:-8] not in err


def test_another_certificate_gets_no_code(
    served: Served,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 4, before the code is sent: it is good for the right machine still."""
    as_user(monkeypatch, tmp_path)
    paste = invited(served)
    pin = paste.partition("pin=")[2][:64]
    wrong = paste.replace(pin, pin[1:] + pin[:1])
    code, _, err = run(capsys, "join", wrong, "--", "true")

    assert code == 4
    assert "certificate" in err
    assert atoll("join", paste, "--", "true", home=tmp_path)[0] == 0


def test_what_cannot_be_run_is_misuse(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is not there is named; one that was not given is asked for."""
    as_user(monkeypatch, served.home)
    code, _, err = run(capsys, "join", served.url, "--", "no-such-command")
    assert code == 2
    assert "'no-such-command' cannot be run: No such file" in err

    code, _, err = run(capsys, "join", served.url)
    assert code == 2
    assert "COMMAND" in err


def test_nobody_is_invited_to_plain_http(tmp_path: Path) -> None:
    """Without TLS a code would travel in the open."""
    with serving(tmp_path, "--no-tls") as served:
        code, out, err = atoll("invite", "lagoon", home=served.home)

    assert (code, out) == (2, "")
    assert "plain HTTP, which is for this machine only" in err


def test_an_invitation_names_the_address_given(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a router or a name, the operator says how others get here."""
    as_user(monkeypatch, served.home)
    port = served.url.rpartition(":")[2]
    code, out, err = run(
        capsys, "invite", "lagoon", "--address", "gate.example.org", "--json"
    )

    assert (code, err) == (0, "")
    assert json.loads(out)["invite"].startswith(f"atoll://gate.example.org:{port}/")
