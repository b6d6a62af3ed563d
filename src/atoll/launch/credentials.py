"""The credentials of islands and coordinators on machines without the user's files.

A pass is a secret that lets an island in: a token of an island, the coordinator's pin,
and the seed of the islands' keys. A machine that replaces another derives the same key,
and so the run takes it for the next start of the same island, at once. It travels as
the value of ATOLL_PASS, or in a private file that ATOLL_PASS_FILE names.

A charter is a secret that a coordinator starts with: the run file, the tokens of the
run, and a certificate with its key. So the process that launched has the credentials of
islands before the coordinator runs, even if it can never reach it. It travels as the
value of ATOLL_CHARTER.

Both go by the engine's own way of secrets. The bootstrap writes them where islands and
coordinators look, and removes them from the environment before the command starts.

Rule 1: a coordinator that is started again gets the same charter: its pin stays valid.
Rule 2: a charter has no more than a run begins with. A lost journal stays lost.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from atoll.errors import CorruptError, UsageError
from atoll.island.connection import REACH_S
from atoll.island.environment import surroundings_from_environment
from atoll.island.identity import KEY_BYTES, keep_key
from atoll.security import (
    Credentials,
    Role,
    Secret,
    check_token,
    fingerprint,
    make_token,
    token_file,
)
from atoll.security.private_files import (
    private_directory,
    read_private,
    replace_private,
)
from atoll.security.tls import CERTIFICATE, KEY

PASS, PASS_FILE = "ATOLL_PASS", "ATOLL_PASS_FILE"
PASS_VERSION = 1
MAX_PASS_BYTES = 2**14
SEED_BYTES = 32

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What an island shows, and what its key is made of."""

    run: str | None
    """The run's id; None if who launched could not ask, and islands have to."""

    seed: Secret
    """Of the launch: hexadecimal digits."""

    url: str | None = None
    """Of the coordinator; a run in a store has none, and its store's credentials."""

    pin: str | None = None
    token: Secret | None = None

    def key(self, island: str) -> bytes:
        """Return the key of an island, the same wherever it is asked for."""
        assert self.run is not None
        seed = bytes.fromhex(self.seed.reveal())
        named = f"{self.run}\0{island}".encode()
        return hashlib.blake2b(named, key=seed, digest_size=KEY_BYTES).digest()

    def to_secret(self) -> Secret:
        """Return the document, for the engine's way of secrets alone."""
        form = {
            "version": PASS_VERSION,
            "run": self.run,
            "seed": self.seed.reveal(),
            "url": self.url,
            "pin": self.pin,
            "token": None if self.token is None else self.token.reveal(),
        }
        return Secret(json.dumps(form))

    @classmethod
    def from_json(cls, said: str) -> Pass:
        """Return the pass of a document.

        Raises:
            CorruptError: it is none. The message shows nothing of it.
        """
        wrong = f"What {PASS} holds is no pass of a launch. Launch the islands again."
        return of_secret(said, _checked_pass, most=MAX_PASS_BYTES, wrong=wrong)

    @classmethod
    def from_file(cls, path: Path) -> Pass:
        """Return the pass that a private file holds."""
        data = read_private(
            path, content="pass", max_bytes=MAX_PASS_BYTES, is_given=True
        )
        return cls.from_json(data.decode(errors="replace"))

    def adopt(self, island: str) -> None:
        """Keep what it gives where islands of this user look. Safe to repeat.

        Raises:
            Unreachable, Refused: it says no run's id, and its coordinator did not.
        """
        around = surroundings_from_environment()
        if self.url is not None:
            tokens = {} if self.token is None else {Role.ISLAND: self.token}
            known = Credentials(around.credentials)
            known.remember(self.url, pin=self.pin, tokens=tokens)
        run = self.run or _asked(self.url)
        key = replace(self, run=run).key(island)
        keep_key(around.keys, run=run, island=island, key=key)


def of_secret(said: str, checked: Callable[[Any], T], *, most: int, wrong: str) -> T:
    """Return what a document that came as a secret holds.

    Raises:
        CorruptError: `checked` does not take it. The message is `wrong`, and shows
            nothing of it.
    """
    try:
        return checked(json.loads(said[: most + 1]))
    except (ValueError, LookupError, TypeError, UsageError, RecursionError):
        raise CorruptError(wrong) from None


def _asked(url: str | None) -> str:
    """Return the id of a run, as its coordinator says."""
    from atoll.launch.run_status import look_at

    assert url is not None
    return look_at(url, wait_s=REACH_S).run


def _checked_pass(form: Any) -> Pass:
    if not isinstance(form, dict) or form["version"] != PASS_VERSION:
        raise ValueError("another version")
    if len(bytes.fromhex(form["seed"])) != SEED_BYTES:
        raise ValueError("a seed of another size")
    texts = (form["run"] or "", form["url"] or "", form["pin"] or "")
    if not all(isinstance(each, str) for each in texts):
        raise ValueError("no text")
    if not form["run"] and not form["url"]:
        raise ValueError("no run")
    token = form["token"]
    return Pass(
        run=form["run"],
        seed=Secret(form["seed"]),
        url=form["url"],
        pin=form["pin"],
        token=None if token is None else check_token(token),
    )


CHARTER = "ATOLL_CHARTER"
RUN_FILE = "run.toml"
CHARTER_VERSION = 1
MAX_CHARTER_BYTES = 2**16
"""A variable of an environment has twice as much, and a run file far less."""


@dataclass(frozen=True, kw_only=True)
class Charter:
    """What one coordinator is made of."""

    id: str
    """Of its directory, where no other was chosen."""

    run_file: str
    """Its text."""

    certificate: str
    key: Secret
    tokens: dict[Role, Secret]

    @property
    def pin(self) -> str:
        """What islands know the coordinator by."""
        return fingerprint(ssl.PEM_cert_to_DER_cert(self.certificate))

    def to_secret(self) -> Secret:
        """Return the document, for the engine's way of secrets alone.

        Raises:
            UsageError: the run file is too large for one.
        """
        form = {
            "version": CHARTER_VERSION,
            "id": self.id,
            "run_file": self.run_file,
            "certificate": self.certificate,
            "key": self.key.reveal(),
            "tokens": {role.value: it.reveal() for role, it in self.tokens.items()},
        }
        said = json.dumps(form)
        if len(said) > MAX_CHARTER_BYTES:
            raise UsageError(
                f"The run file takes {len(self.run_file)} characters, and with what "
                f"its coordinator needs at most {MAX_CHARTER_BYTES} bytes can be sent. "
                "Shorten it."
            )
        return Secret(said)

    @classmethod
    def from_json(cls, said: str) -> Charter:
        """Return the charter of a document.

        Raises:
            CorruptError: it is none. The message shows nothing of it.
        """
        wrong = f"What {CHARTER} holds is no charter of a coordinator. Launch it again."
        return of_secret(said, _checked_charter, most=MAX_CHARTER_BYTES, wrong=wrong)

    def lay_down(self, directory: Path | None = None) -> Path:
        """Return the run's directory, where all of it is. Safe to repeat."""
        usual = surroundings_from_environment().credentials.parent / "served" / self.id
        directory = private_directory(directory or usual)
        # The key first, as `certificate` has it.
        replace_private(directory / KEY, self.key.reveal().encode())
        replace_private(directory / CERTIFICATE, self.certificate.encode())
        for role, token in self.tokens.items():
            replace_private(token_file(directory, role), f"{token.reveal()}\n".encode())
        replace_private(directory / RUN_FILE, self.run_file.encode())
        return directory


def make_charter(name: str, run_file: str) -> Charter:
    """Return what a new coordinator of a run file begins with."""
    from atoll.security.certificates import coordinator_pem, new_key, parse_key

    key = new_key()
    pem = coordinator_pem(parse_key(key), hosts=[], unix_s=time.time())
    return Charter(
        id=f"{name}-{secrets.token_hex(6)}",
        run_file=run_file,
        certificate=pem.decode(),
        key=Secret(key.decode()),
        tokens={role: make_token(role) for role in Role},
    )


def _checked_charter(form: Any) -> Charter:
    if not isinstance(form, dict) or form["version"] != CHARTER_VERSION:
        raise ValueError("another version")
    texts = (form["id"], form["run_file"], form["certificate"], form["key"])
    if not all(isinstance(each, str) for each in texts):
        raise ValueError("no text")
    if Path(form["id"]).name != form["id"]:
        raise ValueError("no name of a directory")
    return Charter(
        id=form["id"],
        run_file=form["run_file"],
        certificate=form["certificate"],
        key=Secret(form["key"]),
        tokens={role: check_token(form["tokens"][role.value]) for role in Role},
    )
