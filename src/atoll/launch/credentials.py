"""The credentials of islands and coordinators on machines without the user's files.

A pass is a secret that lets an island in: a token of an island, the coordinator's pin,
and the seed of the islands' keys. A machine that replaces another derives the same key,
and so the run accepts it immediately as the next start of the same island. It travels
as the value of ATOLL_PASS, or in a private file that ATOLL_PASS_FILE names.

A charter is a secret that a coordinator starts with: the run file, the tokens of the
run, and a certificate with its key. So the process that launched has the credentials of
islands before the coordinator runs, even if it can never reach it. It travels as the
value of ATOLL_CHARTER.

Both use the engine's own mechanism for secrets. The bootstrap writes them to the files
of islands and coordinators, and removes them from the environment before the command
starts.

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
from typing import TypeVar

from atoll import security
from atoll.errors import CorruptError, UsageError
from atoll.fields import JsonField
from atoll.island.connection import connect_read_only
from atoll.island.environment import credentials_from_environment
from atoll.island.identity import KEY_BYTES, keep_key
from atoll.launch.spec import CHARTER, LANGUAGE, MAYBE_TEXT, PASS, TEXT
from atoll.runtime import SystemClock
from atoll.security.private_files import (
    private_directory,
    read_private,
    replace_private,
)
from atoll.security.tls import CERTIFICATE, KEY

PASS_VERSION = 1
MAX_PASS_BYTES = 2**14
SEED_BYTES = 32

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class IslandCredentials:
    """The credentials of an island, and the seed of its key."""

    run: str | None
    """The run's id; None if the launching process could not query it: islands do."""

    seed: security.Secret
    """Of the launch: hexadecimal digits."""

    url: str | None = None
    """Of the coordinator; a run in a store has none, and its store's credentials."""

    pin: str | None = None
    token: security.Secret | None = None

    def key(self, island: str) -> bytes:
        """Return the key of an island, the same on every host."""
        assert self.run is not None
        seed = bytes.fromhex(self.seed.reveal())
        named = f"{self.run}\0{island}".encode()
        return hashlib.blake2b(named, key=seed, digest_size=KEY_BYTES).digest()

    def to_secret(self) -> security.Secret:
        """Return the document, only for the engine's mechanism for secrets."""
        return security.Secret(_document(PASS_VERSION, _PASS.write(self)))

    @classmethod
    def from_json(cls, document: str) -> IslandCredentials:
        """Return the pass of a document.

        Raises:
            CorruptError: it is no pass. The message shows no part of it.
        """
        wrong = f"{PASS} is no valid pass of a launch. Launch the islands again."
        read = of_secret(
            document,
            _PASS,
            version=PASS_VERSION,
            max_chars=MAX_PASS_BYTES,
            wrong=wrong,
        )
        if not (read.run or read.url):
            raise CorruptError(wrong)
        return read

    @classmethod
    def from_file(cls, path: Path) -> IslandCredentials:
        """Return the pass that a private file holds."""
        data = read_private(
            path, content="pass", max_bytes=MAX_PASS_BYTES, is_given=True
        )
        return cls.from_json(data.decode(errors="replace"))

    def adopt(self, island: str) -> None:
        """Store its credentials where islands of this user read them. Safe to repeat.

        Raises:
            Unreachable, Refused: it has no run's id, and the coordinator sent none.
        """
        around = credentials_from_environment()
        if self.url is not None:
            tokens = {} if self.token is None else {security.Role.ISLAND: self.token}
            credentials = security.Credentials(around.credentials)
            credentials.remember(self.url, pin=self.pin, tokens=tokens)
        run = self.run or _run_id(self.url)
        key = replace(self, run=run).key(island)
        keep_key(around.keys, run=run, island=island, key=key)


def _document(version: int, form: object) -> str:
    return json.dumps({"version": version, **LANGUAGE.require_table(form, "it")})


def of_secret(
    document: str, rule: JsonField[T], *, version: int, max_chars: int, wrong: str
) -> T:
    """Return the value of a document that came as a secret.

    Raises:
        CorruptError: `rule` refuses it. The message is `wrong`, and shows no part of
            the document.
    """
    try:
        form = LANGUAGE.require_table(json.loads(document[: max_chars + 1]), "it")
        LANGUAGE.integer(version, version).read(form.pop("version", None), "version")
        return rule.read(form, "it")
    except (ValueError, UsageError, RecursionError):
        raise CorruptError(wrong) from None


def _run_id(url: str | None) -> str:
    """Return the id of a run, from its coordinator."""
    assert url is not None
    http_client, _, info = connect_read_only(
        url, paths=credentials_from_environment(), clock=SystemClock()
    )
    http_client.close()
    return info.run


def _secret(
    read: Callable[[object, str], security.Secret],
) -> JsonField[security.Secret]:
    return JsonField(security.Secret.reveal, read)


_TOKEN = _secret(lambda value, path: security.check_token(TEXT.read(value, path)))
_SEED = LANGUAGE.hexed(SEED_BYTES, SEED_BYTES, is_secret=True)
_PASS: JsonField[IslandCredentials] = LANGUAGE.table(
    IslandCredentials,
    {
        "seed": _secret(
            lambda value, path: security.Secret(_SEED.read(value, path).hex())
        ),
        **dict.fromkeys(("run", "url", "pin"), MAYBE_TEXT),
        "token": LANGUAGE.maybe(_TOKEN),
    },
)


RUN_FILE = "run.toml"
CHARTER_VERSION = 1
MAX_CHARTER_BYTES = 2**16
"""Linux allows twice as much for a variable, and a run file has far less."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorFiles:
    """The files that a coordinator starts with."""

    id: str
    """The name of its directory, if no other was chosen."""

    run_file: str
    """The text of the run file."""

    certificate: str
    key: security.Secret
    tokens: dict[security.Role, security.Secret]

    @property
    def pin(self) -> str:
        """The fingerprint by which islands verify the coordinator."""
        return security.fingerprint(ssl.PEM_cert_to_DER_cert(self.certificate))

    def to_secret(self) -> security.Secret:
        """Return the document, only for the engine's mechanism for secrets.

        Raises:
            UsageError: the run file is too large for one.
        """
        document = _document(CHARTER_VERSION, _CHARTER.write(self))
        if len(document) > MAX_CHARTER_BYTES:
            raise UsageError(
                f"The run file has {len(self.run_file)} characters, and with the "
                f"coordinator's keys at most {MAX_CHARTER_BYTES} bytes can be sent. "
                "Shorten it."
            )
        return security.Secret(document)

    @classmethod
    def from_json(cls, document: str) -> CoordinatorFiles:
        """Return the charter of a document.

        Raises:
            CorruptError: it is no charter. The message shows no part of it.
        """
        wrong = f"{CHARTER} is no valid charter of a coordinator. Launch it again."
        return of_secret(
            document,
            _CHARTER,
            version=CHARTER_VERSION,
            max_chars=MAX_CHARTER_BYTES,
            wrong=wrong,
        )

    def lay_down(self, directory: Path | None = None) -> Path:
        """Write all files into the run's directory, and return it. Safe to repeat."""
        default = credentials_from_environment().credentials.parent / "served" / self.id
        directory = private_directory(directory or default)
        # The key first, as `certificate` has it.
        replace_private(directory / KEY, self.key.reveal().encode())
        replace_private(directory / CERTIFICATE, self.certificate.encode())
        for role, token in self.tokens.items():
            replace_private(
                security.token_file(directory, role), f"{token.reveal()}\n".encode()
            )
        replace_private(directory / RUN_FILE, self.run_file.encode())
        return directory


def make_coordinator_files(name: str, run_file: str) -> CoordinatorFiles:
    """Return the charter of a new coordinator for a run file."""
    from atoll.security.certificates import coordinator_pem, new_key, parse_key

    key = new_key()
    pem = coordinator_pem(parse_key(key), hosts=[], unix_s=time.time())
    return CoordinatorFiles(
        id=f"{name}-{secrets.token_hex(6)}",
        run_file=run_file,
        certificate=pem.decode(),
        key=security.Secret(key.decode()),
        tokens={role: security.make_token(role) for role in security.Role},
    )


_TOKENS = LANGUAGE.table(
    lambda **tokens: {security.Role(name): token for name, token in tokens.items()},
    {role.value: _TOKEN for role in security.Role},
)
_CHARTER: JsonField[CoordinatorFiles] = LANGUAGE.table(
    CoordinatorFiles,
    {
        "id": LANGUAGE.where(
            lambda text: Path(text).name == text, "the name of a directory"
        ),
        "run_file": TEXT,
        "certificate": TEXT,
        "key": _secret(lambda value, path: security.Secret(TEXT.read(value, path))),
        "tokens": JsonField(
            lambda tokens: {role.value: t.reveal() for role, t in tokens.items()},
            lambda value, path: _TOKENS.read(value, path),
        ),
    },
)
