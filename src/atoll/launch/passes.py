"""What lets an island in whose place knows nothing of the user who launched it.

A pass is a secret: a token of an island, the coordinator's pin, and the seed of the
islands' keys. A machine that takes the place of another derives the same key, and so
the run takes it for the next life of the same island, at once.

It travels as the value of ATOLL_PASS, or in a private file that ATOLL_PASS_FILE names,
by the engine's own way of secrets. The bootstrap keeps it where islands look, and takes
it out of the environment before the command starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from atoll.errors import CorruptError, UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.island.keys import KEY_BYTES, keep_key
from atoll.island.reach import REACH_S
from atoll.security import Credentials, Role, Secret, check_token
from atoll.security.private import read_private

PASS, PASS_FILE = "ATOLL_PASS", "ATOLL_PASS_FILE"
VERSION = 1
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
            "version": VERSION,
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
        return of_secret(said, _checked, most=MAX_PASS_BYTES, wrong=wrong)

    @classmethod
    def from_file(cls, path: Path) -> Pass:
        """Return the pass that a private file holds."""
        data = read_private(path, what="pass", max_bytes=MAX_PASS_BYTES, is_given=True)
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
    from atoll.launch.looking import look_at  # what asks loads more

    assert url is not None
    return look_at(url, wait_s=REACH_S).run


def _checked(form: Any) -> Pass:
    if not isinstance(form, dict) or form["version"] != VERSION:
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
