"""Where a secret is, so that it need not be written anywhere.

    env:NAME        in the environment of whoever launches
    file:PATH       in a file that only this user may read, on this machine
    engine:NAME     kept by the engine under that name; `NAME/KEY` where it has several

The first two are read when islands are launched, and reach them by the way that the
engine has for secrets. None is ever part of a command line, a plan or a handle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from atoll.errors import UsageError
from atoll.security import Secret
from atoll.security.private import read_private

MAX_SECRET_BYTES = 2**16
KINDS = ("env", "file", "engine")


def check_reference(variable: str, reference: str) -> tuple[str, str]:
    """Return the kind of a reference, and what it names.

    Raises:
        UsageError: it is none. The message does not show it: it may be the secret.
    """
    kind, _, named = reference.partition(":")
    if kind not in KINDS or not named:
        raise UsageError(
            f"The secret {variable} is given by what is no reference. Write "
            f"{variable}=env:NAME, {variable}=file:PATH or {variable}=engine:NAME."
        )
    return kind, named


def in_engine(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets that the engine keeps itself: its own name of each."""
    found = {name: check_reference(name, said) for name, said in secrets.items()}
    return {name: named for name, (kind, named) in found.items() if kind == "engine"}


def resolve(
    secrets: Mapping[str, str], *, environment: Mapping[str, str]
) -> dict[str, Secret]:
    """Return the values of the secrets that this side keeps.

    Raises:
        UsageError: one is not where its reference says.
    """
    found = {}
    for variable, reference in secrets.items():
        kind, named = check_reference(variable, reference)
        if kind == "env":
            found[variable] = _from_environment(variable, named, environment)
        elif kind == "file":
            data = read_private(
                Path(named), what="secret", max_bytes=MAX_SECRET_BYTES, is_given=True
            )
            found[variable] = _text(variable, data)
    return found


def _from_environment(
    variable: str, named: str, environment: Mapping[str, str]
) -> Secret:
    if named not in environment:
        raise UsageError(
            f"The secret {variable} is to come from {named}, which is not set here. "
            f"Set it, or give {variable}=file:PATH."
        )
    return Secret(environment[named])


def _text(variable: str, data: bytes) -> Secret:
    try:
        return Secret(data.decode().strip())
    except UnicodeDecodeError:
        raise UsageError(f"The file of the secret {variable} holds no text.") from None
