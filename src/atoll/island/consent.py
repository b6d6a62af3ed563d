"""Whether code that comes with a run may be loaded here: only by its digest.

Rule 1: a bundle without code needs nobody's consent.
Rule 2: consent is to one digest, so that a bundle of which a file was edited needs it
        anew. It is said for one command, or once at a terminal, and remembered.
Rule 3: where nobody can be asked, nothing runs, and the flag that allows it is named.
"""

from __future__ import annotations

import sys

from atoll.bundle import Bundle
from atoll.errors import NoSuchFile, UsageError
from atoll.island.definitions import Definition
from atoll.island.environment import Definitions, definitions_from_environment
from atoll.security.private import private_directory, read_private, replace_private

SAID_NO = "none"
"""Where a digest would be: somebody was asked already."""

MAX_NAMES = 12
_MAX_BYTES = 2**12


def require_consent(definition: Definition) -> None:
    """Return when a bundle has no code, or this user lets that code run.

    On a terminal the island's first process asks, once.

    Raises:
        UsageError: it may not run; the flag that says otherwise is named.
    """
    bundle, around = definition.bundle, definitions_from_environment()
    if not bundle.code or is_trusted(bundle, around):
        return
    may_ask = around.consent != SAID_NO and around.rank == 0 and is_at_terminal()
    if may_ask and asked(definition, around):
        return
    raise UsageError(
        f"The run's bundle has code, which would run here as this user: "
        f"{_listed(bundle.code)}. Read it in {definition.directory}; then let it run "
        f"with `atoll join RUN --trust-code {bundle.digest} -- COMMAND`, or with "
        f"ATOLL_TRUST_CODE={bundle.digest}."
    )


def needs_word(bundle: Bundle) -> bool:
    """Return whether somebody must say that a bundle may be loaded.

    The same on all ranks: what one machine remembers, another may not.
    """
    return bool(bundle.code) and definitions_from_environment().consent != bundle.digest


def is_trusted(bundle: Bundle, around: Definitions) -> bool:
    """Return whether this user has let exactly this code run."""
    if around.consent is not None:
        return around.consent == bundle.digest
    try:
        said = read_private(
            around.trusted / bundle.digest, what="consent", max_bytes=_MAX_BYTES
        )
    except NoSuchFile:
        return False
    return said.strip() == bundle.digest.encode()


def is_at_terminal() -> bool:
    """Return whether somebody can read a question, and answer it."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def asked(definition: Definition, around: Definitions) -> bool:
    """Return whether a person at the terminal lets the code run; it is remembered."""
    bundle = definition.bundle
    sys.stderr.write(
        f"The run's model is defined by code, which would run here as this user.\n"
        f"  bundle  {bundle.digest}\n"
        f"  code    {_listed(bundle.code)}\n"
        f"  read it {definition.directory}\n"
        "Let it run, now and whenever it is the same? [y/N] "
    )
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        return False
    private_directory(around.trusted)
    replace_private(around.trusted / bundle.digest, bundle.digest.encode() + b"\n")
    return True


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
