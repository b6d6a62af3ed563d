"""A user's credentials of runs: pins, and tokens or the paths of their files.

Rule 1: one private file per run URL, in a private directory; nothing is shared. The
client certificate, if the run requires one, is a second file: TLS reads files.
Rule 2: a file is replaced whole, under a lock, so that two commands that learn
different tokens of one run at the same time both store theirs.
Rule 3: another pin is another coordinator: the old credentials are discarded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.routes import Role
from atoll.security.addresses import parse_run_url
from atoll.security.private_files import (
    locked,
    private_directory,
    read_private,
    remove_private,
    replace_private,
)
from atoll.security.tls import parse_pin
from atoll.security.tokens import Secret, check_token, read_token, role_claimed

VERSION = 1
MAX_FILE_BYTES = 2**14
MAX_PEM_BYTES = 2**18
LOCK = "lock"

TokenSource = Secret | Path
"""A token itself, or the private file that holds it."""


@dataclass(frozen=True, kw_only=True)
class Credential:
    """The credentials of one run."""

    url: str
    pin: str | None = None
    tokens: Mapping[Role, TokenSource] = field(default_factory=dict)
    certificate: Path | None = None
    """A file with the client certificate and its key."""

    def token(self, needed: Role) -> Secret | None:
        """Return the weakest stored token whose role includes `needed`.

        Raises:
            NoSuchFile, UsageError, CorruptError: as `read_token`, for the stored
                path.
        """
        roles = [role for role in Role if role.includes(needed) and role in self.tokens]
        if not roles:
            return None
        source = self.tokens[roles[0]]
        return (
            source if isinstance(source, Secret) else read_token(source, role=roles[0])
        )


def credentials_directory(home: Path, *, xdg_config_home: str | None) -> Path:
    """Return the directory of credentials; a relative XDG_CONFIG_HOME is ignored."""
    xdg_path = Path(xdg_config_home) if xdg_config_home else None
    base = xdg_path if xdg_path and xdg_path.is_absolute() else home / ".config"
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
        tokens: Mapping[Role, TokenSource],
        certificate: Path | None = None,
    ) -> Credential:
        """Add credentials of a run to the stored ones, durably. Safe to repeat.

        Args:
            run_url: The URL of the run.
            pin: The fingerprint of its coordinator's certificate.
            tokens: The new tokens; those of other roles stay.
            certificate: A private file with the client certificate and its key. It is
                copied.

        Raises:
            UsageError: the URL, the pin or a token is malformed, or the directory
                cannot be written or is open to others.
            DiskError: the disk failed; the stored credentials stay.
        """
        url = str(parse_run_url(run_url))
        pin = None if pin is None else parse_pin(pin)
        for role, source in tokens.items():
            _check(role, source)
        with self._locked():
            current = self._known(url)
            same = current if current and current.pin == pin else Credential(url=url)
            new = Credential(
                url=url,
                pin=pin,
                tokens={**same.tokens, **tokens},
                certificate=self._copied(url, certificate) or same.certificate,
            )
            replace_private(self._path(url), _written(new))
        return new

    def find(self, run_url: str) -> Credential | None:
        """Return the credentials of a run, if any are stored.

        Raises:
            UsageError: the URL is malformed, or others may read the file.
            CorruptError: the file is damaged.
        """
        url = str(parse_run_url(run_url))
        path = self._path(url)
        try:
            data = read_private(path, content="credential", max_bytes=MAX_FILE_BYTES)
        except NoSuchFile:
            return None
        return _parsed(data, path=path, url=url)

    def forget(self, run_url: str) -> bool:
        """Remove the credentials of a run; return whether there were any."""
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
            certificate, content="key", max_bytes=MAX_PEM_BYTES, is_given=True
        )
        copy = _certificate_beside(self._path(url))
        replace_private(copy, pem)
        return copy

    def _known(self, url: str) -> Credential | None:
        try:
            return self.find(url)
        except CorruptError:
            return None  # damaged, and about to be replaced

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = private_directory(self._directory) / LOCK
        with locked(path):
            yield


def _certificate_beside(path: Path) -> Path:
    return path.with_suffix(".pem")


def _check(role: Role, source: TokenSource) -> None:
    if isinstance(source, Path):
        if not source.is_absolute():
            raise UsageError(
                f"{source} is a relative path. Give where it is from '/' on."
            )
    elif role_claimed(source) is not role:
        raise UsageError(f"That is no token of an {role.value}. Ask for a new invite.")


def _written(credential: Credential) -> bytes:
    tokens = {
        role.value: {"file": str(source)}
        if isinstance(source, Path)
        else {"token": source.reveal()}
        for role, source in credential.tokens.items()
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
        tokens = {
            Role(role): _token_source(Role(role), stored)
            for role, stored in form["tokens"].items()
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
        # Without its cause, which quotes the content.
        raise CorruptError(
            f"{path} is not the stored credential of {url}. Remove it, and use a new "
            "invite."
        ) from None
    certificate = _certificate_beside(path) if has_certificate else None
    return Credential(url=url, pin=pin, tokens=tokens, certificate=certificate)


def _token_source(role: Role, stored: Mapping[str, str]) -> TokenSource:
    source: TokenSource = (
        Path(stored["file"]) if "file" in stored else check_token(stored["token"])
    )
    _check(role, source)
    return source
