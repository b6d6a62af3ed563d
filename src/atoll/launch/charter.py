"""What a coordinator begins with, made by who launches it where none of its files are.

A charter is a secret: the run file, the tokens of the run, and a certificate with its
key. So whoever launched knows how islands get in before the coordinator runs, although
nobody here may ever reach it.

It travels as the value of ATOLL_CHARTER, by the engine's own way of secrets. The
bootstrap lays it down in the run's directory, and takes it out of the environment
before the coordinator starts, which finds there what it would have made itself.

Rule 1: a coordinator that is started again lays down the same: who pinned it, knows it.
Rule 2: it holds no more than a run begins with. Who has lost its journal has lost it.
"""

from __future__ import annotations

import json
import secrets
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.launch.passes import of_secret
from atoll.security import (
    Role,
    Secret,
    check_token,
    fingerprint,
    make_token,
    token_file,
)
from atoll.security.contexts import CERTIFICATE, KEY
from atoll.security.private import private_directory, replace_private

CHARTER = "ATOLL_CHARTER"
RUN_FILE = "run.toml"
VERSION = 1
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
            "version": VERSION,
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
        return of_secret(said, _checked, most=MAX_CHARTER_BYTES, wrong=wrong)

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
    from atoll.security.issuing import coordinator_pem, new_key, parse_key

    key = new_key()
    pem = coordinator_pem(parse_key(key), hosts=[], unix_s=time.time())
    return Charter(
        id=f"{name}-{secrets.token_hex(6)}",
        run_file=run_file,
        certificate=pem.decode(),
        key=Secret(key.decode()),
        tokens={role: make_token(role) for role in Role},
    )


def _checked(form: Any) -> Charter:
    if not isinstance(form, dict) or form["version"] != VERSION:
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
