"""What a user's own configuration knows of runs: pins, and tokens or where they are.

Rule 1: one private file per run URL, in a private directory; nothing is shared. The
certificate to show there, where one is asked for, is a second one: TLS reads files.
Rule 2: a file is replaced whole, under a lock, so that two commands that learn
different tokens of one run at the same time both keep theirs.
Rule 3: another pin is another coordinator: what was known of the last is forgotten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.security.addresses import parse_run_url
from atoll.security.contexts import parse_pin
from atoll.security.private import (
    locked,
    private_directory,
    read_private,
    remove_private,
    replace_private,
)
from atoll.security.secret import Secret
from atoll.security.tokens import Role, check_token, read_token, role_claimed

VERSION = 1
MAX_FILE_BYTES = 2**14
MAX_PEM_BYTES = 2**18
LOCK = "lock"

Kept = Secret | Path
"""A token itself, or the private file that holds it."""


@dataclass(frozen=True, kw_only=True)
class Credential:
    """What is known of one run."""

    url: str
    pin: str | None = None
    kept: Mapping[Role, Kept] = field(default_factory=dict)
    certificate: Path | None = None
    """A file with the certificate to show there, and its key."""

    def token(self, needed: Role) -> Secret | None:
        """Return a token that may do what `needed` may, the weakest one that is known.

        Raises:
            NoSuchFile, UsageError, CorruptError: as `read_token`, of the file that
                was remembered.
        """
        roles = [role for role in Role if role.includes(needed) and role in self.kept]
        if not roles:
            return None
        kept = self.kept[roles[0]]
        return kept if isinstance(kept, Secret) else read_token(kept, role=roles[0])


def credentials_directory(home: Path, *, xdg_config_home: str | None) -> Path:
    """Return where a user's credentials are; a relative XDG_CONFIG_HOME is ignored."""
    given = Path(xdg_config_home) if xdg_config_home else None
    base = given if given and given.is_absolute() else home / ".config"
    return base / "atoll" / "runs"


class Credentials:
    """The credentials of one user, in one directory, made when first written to."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def remember(
        self,
        run_url: str,
        *,
        pin: str | None,
        tokens: Mapping[Role, Kept],
        certificate: Path | None = None,
    ) -> Credential:
        """Add what is known of a run to what was, durably. Safe to repeat.

        Args:
            run_url: Where the run is.
            pin: The fingerprint of its coordinator's certificate.
            tokens: What was learned; another role's stays.
            certificate: A private file with the caller's own and its key. It is copied.

        Raises:
            UsageError: the URL, the pin or a token is none, or the directory cannot
                be written or is open to others.
            DiskError: the disk failed; what was known stands.
        """
        url = str(parse_run_url(run_url))
        pin = None if pin is None else parse_pin(pin)
        for role, kept in tokens.items():
            _check(role, kept)
        with self._locked():
            known = self._known(url)
            same = known if known and known.pin == pin else Credential(url=url)
            new = Credential(
                url=url,
                pin=pin,
                kept={**same.kept, **tokens},
                certificate=self._copied(url, certificate) or same.certificate,
            )
            replace_private(self._path(url), _written(new))
        return new

    def find(self, run_url: str) -> Credential | None:
        """Return what is known of a run.

        Raises:
            UsageError: the URL is none, or others may read the file.
            CorruptError: the file is damaged.
        """
        url = str(parse_run_url(run_url))
        path = self._path(url)
        try:
            data = read_private(path, what="credential", max_bytes=MAX_FILE_BYTES)
        except NoSuchFile:
            return None
        return _parsed(data, path=path, url=url)

    def forget(self, run_url: str) -> bool:
        """Remove what is known of a run; say whether anything was."""
        path = self._path(str(parse_run_url(run_url)))
        remove_private(_certificate_beside(path))
        return remove_private(path)

    def _path(self, url: str) -> Path:
        digest = hashlib.sha256(url.encode()).hexdigest()
        return self._directory / f"{digest[:32]}.json"

    def _copied(self, url: str, certificate: Path | None) -> Path | None:
        if certificate is None:
            return None
        pem = read_private(
            certificate, what="key", max_bytes=MAX_PEM_BYTES, is_given=True
        )
        copy = _certificate_beside(self._path(url))
        replace_private(copy, pem)
        return copy

    def _known(self, url: str) -> Credential | None:
        try:
            return self.find(url)
        except CorruptError:
            return None  # it is of no use, and about to be replaced

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = private_directory(self._directory) / LOCK
        with locked(path):
            yield


def _certificate_beside(path: Path) -> Path:
    return path.with_suffix(".pem")


def _check(role: Role, kept: Kept) -> None:
    if isinstance(kept, Path):
        if not kept.is_absolute():
            raise UsageError(
                f"{kept} is a relative path. Give where it is from '/' on."
            )
    elif role_claimed(kept) is not role:
        raise UsageError(f"That is no token of an {role.value}. Ask for a new invite.")


def _written(credential: Credential) -> bytes:
    tokens = {
        role.value: {"file": str(kept)}
        if isinstance(kept, Path)
        else {"token": kept.reveal()}
        for role, kept in credential.kept.items()
    }
    form = {
        "version": VERSION,
        "url": credential.url,
        "pin": credential.pin,
        "tokens": tokens,
        "has_certificate": credential.certificate is not None,
    }
    return json.dumps(form, indent=2).encode() + b"\n"


def _parsed(data: bytes, *, path: Path, url: str) -> Credential:
    try:
        form = json.loads(data)
        if form["version"] != VERSION or form["url"] != url:
            raise ValueError("another version or run")
        pin = None if form["pin"] is None else parse_pin(form["pin"])
        kept = {
            Role(role): _kept(Role(role), how) for role, how in form["tokens"].items()
        }
        has_certificate = bool(form.get("has_certificate"))
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        UsageError,
        RecursionError,
    ):
        # Without its cause, which quotes what it could not read.
        raise CorruptError(
            f"{path} is not what was remembered of {url}. Remove it, and use a new "
            "invite."
        ) from None
    certificate = _certificate_beside(path) if has_certificate else None
    return Credential(url=url, pin=pin, kept=kept, certificate=certificate)


def _kept(role: Role, how: Mapping[str, str]) -> Kept:
    kept: Kept = Path(how["file"]) if "file" in how else check_token(how["token"])
    _check(role, kept)
    return kept
