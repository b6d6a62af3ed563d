"""What a user's own configuration remembers of runs."""

from __future__ import annotations

import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.security import (
    Credentials,
    Role,
    credentials_directory,
    make_token,
    run_tokens,
    token_file,
)
from tests.security.shown import everything_shown

URL = "https://host.example:8443"
HERE = "http://127.0.0.1:8000"
PIN = "sha256:" + "ab" * 32
ISLAND = make_token(Role.ISLAND)
OPERATOR = make_token(Role.OPERATOR)


def the_file(directory: Path) -> Path:
    """Return the one file of a run."""
    (path,) = directory.glob("*.json")
    return path


def test_what_was_remembered_is_found(tmp_path: Path) -> None:
    """However the URL is spelt, in files of the user's own."""
    directory = tmp_path / "runs"
    Credentials(directory).remember(URL, pin=PIN, tokens={Role.ISLAND: ISLAND})
    found = Credentials(directory).find("HTTPS://Host.example:8443/")

    assert found is not None
    assert (found.url, found.pin) == (URL, PIN)
    assert found.token(Role.ISLAND) == ISLAND
    assert found.token(Role.OPERATOR) is None
    assert ISLAND.reveal() not in repr(found)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == {0o600}


def test_the_user_who_serves_types_nothing(tmp_path: Path) -> None:
    """The files of the run are remembered, and read when they are needed."""
    made = run_tokens(tmp_path / "run")
    files = {role: token_file(tmp_path / "run", role) for role in Role}
    known = Credentials(tmp_path / "runs")
    known.remember(HERE, pin=None, tokens=files)

    found = known.find(HERE)
    assert found is not None
    assert {role: found.token(role) for role in Role} == made
    assert made[Role.OPERATOR].reveal() not in the_file(tmp_path / "runs").read_text()
    files[Role.ISLAND].unlink()
    with pytest.raises(NoSuchFile, match=r"island\.token does not exist"):
        found.token(Role.ISLAND)


def test_a_certificate_is_copied_and_found(tmp_path: Path) -> None:
    """What was given may be removed; another pin, or forgetting, forgets it too."""
    file = tmp_path / "tokyo-1.pem"
    file.write_text("a key")
    file.chmod(0o600)
    known = Credentials(tmp_path / "runs")
    known.remember(URL, pin=PIN, tokens={}, certificate=file)
    file.unlink()
    known.remember(URL, pin=PIN, tokens={Role.ISLAND: ISLAND})

    found = known.find(URL)
    assert found is not None
    assert found.certificate is not None
    assert found.certificate.read_text() == "a key"
    assert stat.S_IMODE(found.certificate.stat().st_mode) == 0o600
    assert found.token(Role.ISLAND) == ISLAND
    known.remember(URL, pin=None, tokens={})
    again = known.find(URL)
    assert again is not None
    assert again.certificate is None
    assert known.forget(URL)
    assert {path.suffix for path in (tmp_path / "runs").iterdir()} == {""}


def test_a_certificate_that_others_may_read_is_not_taken(tmp_path: Path) -> None:
    """Its key may be known already; how to mend that is said."""
    file = tmp_path / "tokyo-1.pem"
    file.write_text("a key")
    file.chmod(0o644)
    known = Credentials(tmp_path / "runs")

    with pytest.raises(UsageError, match=r"others may read this key.*chmod 600"):
        known.remember(URL, pin=PIN, tokens={}, certificate=file)
    assert known.find(URL) is None


def test_an_operator_needs_no_second_token(tmp_path: Path) -> None:
    """Where only the operator's is known, it serves for an island too."""
    known = Credentials(tmp_path / "runs")
    known.remember(URL, pin=PIN, tokens={Role.OPERATOR: OPERATOR})
    found = known.find(URL)

    assert found is not None
    assert found.token(Role.ISLAND) == OPERATOR


def test_roles_are_added_and_another_pin_starts_anew(tmp_path: Path) -> None:
    """A token learnt later joins the first; another coordinator gets neither."""
    known = Credentials(tmp_path / "runs")
    known.remember(URL, pin=PIN, tokens={Role.OPERATOR: OPERATOR})
    known.remember(URL, pin=PIN.upper(), tokens={Role.ISLAND: ISLAND})
    both = known.find(URL)
    known.remember(URL, pin="cd" * 32, tokens={Role.ISLAND: ISLAND})
    one = known.find(URL)

    assert both is not None
    assert one is not None
    assert both.token(Role.OPERATOR) == OPERATOR
    assert both.token(Role.ISLAND) == ISLAND
    assert one.token(Role.OPERATOR) is None


def test_runs_are_kept_apart(tmp_path: Path) -> None:
    """Another port, scheme or spelling of loopback is another run."""
    known = Credentials(tmp_path / "runs")
    known.remember(HERE, pin=None, tokens={Role.ISLAND: ISLAND})

    assert known.find("http://127.0.0.1:8001") is None
    assert known.find("https://127.0.0.1:8000") is None
    assert known.find("http://localhost:8000") is None
    assert known.find("http://[::1]:8000") is None


def test_what_was_forgotten_is_not_found(tmp_path: Path) -> None:
    """Also when nothing was ever known, without making a directory."""
    known = Credentials(tmp_path / "runs")

    assert known.find(URL) is None
    assert not known.forget(URL)
    assert not (tmp_path / "runs").exists()
    known.remember(URL, pin=PIN, tokens={})
    assert known.forget(URL)
    assert known.find(URL) is None


def test_two_that_write_at_the_same_time_both_keep_theirs(tmp_path: Path) -> None:
    """Each learns another role of the same run: neither is lost, no draft is left."""
    known = Credentials(tmp_path / "runs")
    urls = [f"https://host.example:{port}" for port in range(1, 21)]
    tokens = {Role.ISLAND: ISLAND, Role.OPERATOR: OPERATOR}
    together = threading.Barrier(2)

    def learn(role: Role) -> None:
        for url in urls:
            together.wait()
            known.remember(url, pin=PIN, tokens={role: tokens[role]})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(learn, Role))

    found = [known.find(url) for url in urls]
    assert [each.tokens for each in found if each] == [tokens] * len(urls)
    suffixes = [path.suffix for path in (tmp_path / "runs").iterdir()]
    assert sorted(suffixes) == ["", *[".json"] * len(urls)]


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """When it is read, and when it is written over."""
    known = Credentials(tmp_path / "runs")
    known.remember(URL, pin=PIN, tokens={Role.ISLAND: ISLAND})
    the_file(tmp_path / "runs").chmod(0o640)

    with pytest.raises(UsageError, match=r"mode 640.*credential.*chmod 600"):
        known.find(URL)
    with pytest.raises(UsageError, match=r"mode 640.*credential.*chmod 600"):
        known.remember(URL, pin=PIN, tokens={})


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """Nothing is written there."""
    tmp_path.chmod(0o750)

    with pytest.raises(UsageError, match=r"mode 750.*chmod 700"):
        Credentials(tmp_path).remember(URL, pin=PIN, tokens={})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda form: "",
        lambda form: "[" * 10_000,
        lambda form: "[]",
        lambda form: json.dumps(form | {"version": 2}),
        lambda form: json.dumps(form | {"url": "https://other.example:1"}),
        lambda form: json.dumps(form | {"pin": "ab"}),
        lambda form: json.dumps(form | {"pin": 7}),
        lambda form: json.dumps(form | {"tokens": []}),
        lambda form: json.dumps(form | {"tokens": {"root": {}}}),
        lambda form: json.dumps(form | {"tokens": {"island": {"file": "a"}}}),
        lambda form: json.dumps(form | {"tokens": {"island": {"file": 3}}}),
        lambda form: json.dumps(
            form | {"tokens": {"operator": form["tokens"]["island"]}}
        ),
        lambda form: json.dumps(form)[:-40],
    ],
)
def test_damage_is_found_not_shown_and_can_be_replaced(
    tmp_path: Path, change: object
) -> None:
    """What is not exactly what was written is never used."""
    known = Credentials(tmp_path / "runs")
    known.remember(URL, pin=PIN, tokens={Role.ISLAND: ISLAND})
    path = the_file(tmp_path / "runs")
    assert callable(change)
    path.write_text(change(json.loads(path.read_text())))

    with pytest.raises(
        CorruptError, match=r"not the stored credential.*Remove it"
    ) as seen:
        known.find(URL)
    assert ISLAND.reveal()[:20] not in everything_shown(seen.value)
    assert known.remember(URL, pin=PIN, tokens={}) == known.find(URL)


def test_what_cannot_be_remembered_is_refused(tmp_path: Path) -> None:
    """Plain HTTP beyond loopback, relative files, tokens of another role, bad pins."""
    known = Credentials(tmp_path / "runs")
    with pytest.raises(UsageError, match="in the open"):
        known.remember("http://host.example:1", pin=None, tokens={})
    with pytest.raises(UsageError, match="relative path"):
        known.remember(URL, pin=None, tokens={Role.ISLAND: Path("island.token")})
    with pytest.raises(UsageError, match="no token of an operator") as caught:
        known.remember(URL, pin=None, tokens={Role.OPERATOR: ISLAND})
    with pytest.raises(UsageError, match="not a fingerprint"):
        known.remember(URL, pin="sha256:12", tokens={})

    assert ISLAND.reveal() not in everything_shown(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "/home/u/.config/atoll/runs"),
        ("", "/home/u/.config/atoll/runs"),
        ("relative", "/home/u/.config/atoll/runs"),
        ("/else/where", "/else/where/atoll/runs"),
    ],
)
def test_the_directory_follows_the_desktop_rules(
    given: str | None, expected: str
) -> None:
    """An absolute XDG_CONFIG_HOME counts; any other is ignored, as it demands."""
    found = credentials_directory(Path("/home/u"), xdg_config_home=given)

    assert found == Path(expected)
