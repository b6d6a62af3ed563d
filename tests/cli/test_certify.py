"""Mutual TLS by commands: a certificate lets a machine in, and nothing else does."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.cli.certify import certify
from atoll.security import Credentials
from tests.cli.runs import (
    ISLAND,
    Served,
    as_user,
    atoll,
    ended,
    environment,
    run,
    serving,
    started,
)


@dataclass(frozen=True)
class Strict:
    """A run that asks for certificates, and those that were made for it."""

    served: Served
    place: Path
    certificate: Path
    """Of an island of the run."""

    foreign: Path
    """Of an authority that the run has never heard of."""

    def invited(self) -> str:
        """Return a new invitation."""
        code, out, err = atoll(
            *("invite", "lagoon", "--json"),
            home=self.served.home,
            ATOLL_CERTIFICATE=str(self.certificate),
        )
        assert code == 0, err
        return str(json.loads(out)["invite"])


def certified(directory: Path, name: str, place: Path) -> Path:
    """Return a certificate that the authority of a directory has signed."""
    certify(str(directory), name, into=place)
    return place / f"{name}.pem"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strict]:
    """Serve a run that asks for certificates, by its own authority."""
    place = tmp_path_factory.mktemp("strict")
    own = place / "run"
    own.mkdir(mode=0o700)
    certificate = certified(own, "tokyo-1", place)
    foreign = certified(place / "foreign.atoll", "mallory", place)
    with serving(place, "--island-certificates", own / "authority.pem") as served:
        yield Strict(served, place, certificate, foreign)


def test_a_certificate_is_one_private_file(
    strict: Strict, capsys: pytest.CaptureFixture[str]
) -> None:
    """Authority, keys and certificates are the user's own; none is written twice."""
    made = [strict.certificate, *(strict.place / "run").glob("authority.*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    assert len(made) == 3

    words = ("certify", strict.place / "run", "tokyo-1", "--into", strict.place)
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert "is never written twice" in err


def test_islands_with_certificates_train_to_the_end(tmp_path: Path) -> None:
    """The certificate is given once, with the invitation; later the name will do.

    Another user pastes an invitation, with the file, which is removed then. Two islands
    join by the run's id, and have the same weights when the run has ended.
    """
    (tmp_path / "run").mkdir(mode=0o700)
    certificate = certified(tmp_path / "run", "tokyo-1", tmp_path)
    authority = tmp_path / "run" / "authority.pem"
    script = tmp_path / "train.py"
    script.write_text(ISLAND)
    there = tmp_path / "elsewhere"
    options = ("--island-certificates", authority, "--until-end")
    with serving(tmp_path, *options) as served:
        strict = Strict(served, tmp_path, certificate, certificate)
        shown = ("--certificate", certificate)
        words = ("join", strict.invited(), *shown, "--", "true")
        assert atoll(*words, home=there)[0] == 0
        certificate.unlink()
        islands = [
            started("join", served.said["run"], "--", script, home=there)
            for _ in range(2)
        ]
        said = [ended(process) for process in islands]
        assert [code for code, _, _ in said] == [0, 0], said
        assert len({out.split()[1] for _, out, _ in said}) == 1
        assert served.process.wait(60) == 0


def test_without_a_certificate_the_way_out_is_named(
    strict: Strict, tmp_path: Path
) -> None:
    """Exit code 4: who is invited learns what is missing, and the code stays good."""
    paste = strict.invited()
    code, out, err = atoll("join", paste, "--", "true", home=tmp_path)

    assert (code, out) == (4, "")
    assert "asks for a certificate, and none was shown" in err
    assert "atoll certify RUN NAME" in err
    assert "--certificate FILE" in err
    shown = ("--certificate", strict.certificate)
    assert atoll("join", paste, *shown, "--", "true", home=tmp_path)[0] == 0


def test_another_authoritys_certificate_is_refused(
    strict: Strict, tmp_path: Path
) -> None:
    """Exit code 4, and the file that was shown is named."""
    shown = ("--certificate", strict.foreign)
    code, out, err = atoll(
        "join", strict.invited(), *shown, "--", "true", home=tmp_path
    )

    assert (code, out) == (4, "")
    assert "refuses the certificate in" in err
    assert "another authority has signed it" in err


def test_commands_and_doctors_show_it_too(
    strict: Strict, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ATOLL_CERTIFICATE, which holds the key too."""
    as_user(monkeypatch, strict.served.home, ATOLL_CERTIFICATE=str(strict.certificate))
    assert run(capsys, "status", "lagoon")[0] == 0
    assert run(capsys, "doctor", "lagoon")[0] == 0
    monkeypatch.setenv("ATOLL_CERTIFICATE", str(strict.foreign))
    code, out, _ = run(capsys, "doctor", "lagoon")

    assert code == 4
    assert "refuses the certificate in" in out.splitlines()[-1]


def test_a_paste_says_that_a_certificate_belongs_to_it(strict: Strict) -> None:
    """The command to paste has its place, and the operator learns how to make it."""
    code, paste, err = atoll(
        "invite",
        "lagoon",
        home=strict.served.home,
        ATOLL_CERTIFICATE=str(strict.certificate),
    )

    assert code == 0
    assert shlex.split(paste)[3:] == ["--certificate", "NAME.pem", "--", "COMMAND"]
    assert "atoll certify lagoon NAME" in err


def test_a_person_is_told_what_to_do_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, how to serve, how to join, and that it is a secret."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "certify", "lagoon.atoll", "tokyo-1")

    assert code == 0
    facts = {line[:12].strip(): line[13:] for line in out.splitlines()}
    assert facts["certificate"] == str(tmp_path / "tokyo-1.pem")
    assert facts["authority"] == str(tmp_path / "lagoon.atoll" / "authority.pem")
    assert "--island-certificates" in facts["serve"]
    assert facts["join"].endswith("--certificate tokyo-1.pem -- COMMAND")
    assert "tokyo-1.pem holds a private key" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lagon", "x"], "'lagon' is no URL of a run"),
        (["a.atoll", "../x"], "names no file"),
        (["a.atoll", "x" * 65], "cannot stand in a certificate"),
        (["open.atoll", "x"], "has mode 755: others may enter it"),
    ],
)
def test_what_cannot_be_certified_is_misuse(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    """Exit code 2 and the reason; no certificate is left behind."""
    as_user(monkeypatch, tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open.atoll").mkdir(mode=0o755)
    code, out, err = run(capsys, "certify", *words)

    assert (code, out) == (2, "")
    assert message in err
    assert list(tmp_path.glob("*.pem")) == []


def test_two_certificates_are_one_too_many(
    strict: Strict, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option and a variable that name two files are not guessed between."""
    as_user(monkeypatch, strict.served.home, ATOLL_CERTIFICATE=str(strict.certificate))
    code, _, err = run(
        capsys, "join", "lagoon", "--certificate", strict.foreign, "--", "true"
    )

    assert code == 2
    assert "Give one of them" in err


def test_whoever_serves_types_nothing(strict: Strict) -> None:
    """The run's own authority signs a certificate for this user's own commands."""
    code, out, err = atoll("status", "lagoon", "--json", home=strict.served.home)

    assert (code, err) == (0, "")
    assert json.loads(out)["state"] == "founding"
    own = strict.place / "run" / "operator.pem"
    assert stat.S_IMODE(own.stat().st_mode) == 0o600


def test_a_bare_island_reads_what_is_missing(strict: Strict, tmp_path: Path) -> None:
    """Without `atoll join` it ends at once, with the same words."""
    script = tmp_path / "train.py"
    script.write_text(ISLAND)
    served = strict.served
    around = environment(
        tmp_path,
        ATOLL_RUN=served.url,
        ATOLL_TOKEN_FILE=served.said["tokens"]["island"],
    )
    Credentials(tmp_path / "atoll" / "runs").remember(
        served.url, pin=served.said["pin"], tokens={}
    )
    done = subprocess.run(
        [sys.executable, script], env=around, capture_output=True, text=True, timeout=60
    )

    assert done.returncode != 0
    assert "asks for a certificate, and none was shown" in done.stderr
