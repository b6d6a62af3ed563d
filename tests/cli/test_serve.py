"""`atoll serve`: what it says, what it keeps, and how it ends."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path

import pytest

from tests.cli.runs import RUN_FILE, as_user, atoll, ended, run, serving, started


def test_it_says_where_it_is_and_closes_cleanly(tmp_path: Path) -> None:
    """URL, pin and tokens are told; SIGTERM is exit 0, and a restart is the same run.

    The port and the certificate are those of before: islands call there still.
    """
    with serving(tmp_path) as first:
        tokens = [Path(path) for path in first.said["tokens"].values()]
        assert first.url.startswith("https://127.0.0.1:")
        assert first.said["pin"].startswith("sha256:")
        assert [stat.S_IMODE(path.stat().st_mode) for path in tokens] == [0o600] * 2
        assert first.stop() == (0, "")

    with serving(tmp_path, "--set", "run.quorum=2") as second:
        assert second.said == first.said
        code, complaints = second.stop(signal.SIGINT)

    assert code == 0
    assert complaints.splitlines() == [
        "atoll: run.quorum=1 is in force, and the run file has 2. Change it with: "
        f"atoll control {first.said['run']} set run.quorum=2"
    ]


def test_a_person_reads_lines(tmp_path: Path) -> None:
    """Without --json there is one fact per line, and the next commands."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    options = ("--dir", tmp_path / "run", "--until-end", "--no-tls")

    process = started("serve", tmp_path / "run.toml", *options, home=tmp_path)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(7)]
    process.send_signal(signal.SIGTERM)
    status, rest, err = ended(process)

    assert (status, rest, err) == (0, "", "")
    facts = {line[:14].strip(): line[15:].strip() for line in lines}
    assert facts["url"].startswith("http://127.0.0.1:")
    assert facts["pin"] == "none: plain HTTP, on this machine only"
    assert facts["operator token"] == str(tmp_path / "run" / "operator.token")
    assert facts["look"] == "atoll status lagoon"
    assert "invite" not in facts


def test_two_cannot_serve_one_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is told so, with exit code 2, and the first goes on."""
    with serving(tmp_path) as first:
        as_user(monkeypatch, first.home)
        options = ("--dir", first.directory, "--port", "0")
        code, _, err = run(capsys, "serve", tmp_path / "run.toml", *options)
        assert code == 2
        assert str(first.directory) in err
        assert run(capsys, "status", first.url)[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-tls", "--listen", "0.0.0.0"], "without TLS"),
        (["--set", "sync.sync_evry=5"], "Did you mean 'sync.sync_every'?"),
        (["--island-certificates", "gone.pem"], "gone.pem"),
        (["--port", "70000"], "'--port'"),
    ],
)
def test_options_that_do_not_fit_are_misuse(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    """Exit code 2 and the reason, before anybody can call."""
    as_user(monkeypatch, tmp_path / "home")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    place = ("--dir", tmp_path / "run")
    code, out, err = run(capsys, "serve", tmp_path / "run.toml", *place, *options)

    assert (code, out) == (2, "")
    assert message in err


def test_momentum_that_wants_more_rounds_is_told(tmp_path: Path) -> None:
    """Below 200 rounds momentum 0.9 is called what it is, and the run goes on."""
    with serving(tmp_path, "--set", "outer.momentum=0.9") as served:
        code, complaints = served.stop()

    assert code == 0
    assert complaints == (
        "atoll: outer.momentum=0.9 wants about 200 rounds, and run.end_rounds=4. "
        "Choose 0.5 to 0.8 for a short run.\n"
    )


def test_the_directory_is_named_by_the_run(tmp_path: Path) -> None:
    """Without --dir it is ./NAME.atoll; another run file is refused there."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "lagoon.atoll").mkdir(mode=0o755)

    process = started("serve", "run.toml", home=tmp_path, cwd=tmp_path)
    code, _, err = ended(process)

    assert code == 2
    assert "lagoon.atoll has mode 755: others may enter it" in err


def test_curves_are_written_if_asked_for(tmp_path: Path) -> None:
    """--tensorboard takes part in the run without a word."""
    with serving(tmp_path, "--tensorboard") as served:
        code, out, _ = atoll("status", served.url, "--json", home=served.home)
        assert (code, json.loads(out)["state"]) == (0, "founding")
        assert served.stop() == (0, "")
