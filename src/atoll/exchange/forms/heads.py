"""The head of a request, judged before its body is read.

A name that a frame could not carry is refused before anybody looks it up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from atoll.errors import Unreachable, UsageError
from atoll.exchange.forms.fields import U64_MAX, hexed, require_target_name, wrong
from atoll.exchange.forms.identities import (
    PROOF_HEADER,
    Claim,
    Identity,
    read_claim,
    require_claimed,
)
from atoll.exchange.forms.messages import BEAT
from atoll.exchange.forms.routes import (
    ROUTES,
    Proof,
    Route,
    Takes,
    decoded,
    split_target,
)
from atoll.exchange.forms.text import SEE, load
from atoll.protocol import Beat
from atoll.protocol.constants import is_digest
from atoll.settings.rules import shown
from atoll.wire.header import MAX_FRAGMENT
from atoll.wire.receipt import RECEIPT_BYTES

PROTOCOL = 2
"""Raised when a form changes; both sides must have the same."""

PROTOCOL_HEADER, RUN_HEADER = "Atoll-Protocol", "Atoll-Run"
BEAT_HEADER = "Atoll-Beat"
MAX_BEAT_BYTES = 16 * 1024
"""Of a beat in a header."""

STATE_RECEIPT_HEADER = "Atoll-State-Receipt"
"""The run's receipt for a state, or for the state after an outcome, in hex."""

OUTCOME_RECEIPT_HEADER = "Atoll-Outcome-Receipt"
"""The run's receipt for an outcome; with a recovery one for each, after commas."""

MAX_WAIT_S = 60.0
"""The longest that a question for an outcome may wait."""

_RECEIPT = hexed(RECEIPT_BYTES, RECEIPT_BYTES)
_DECIMAL = re.compile("0|[1-9][0-9]{0,19}")
_SECONDS = re.compile(r"[0-9]{1,2}(\.[0-9]{1,20})?(e-[0-9]{1,3})?")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The head of a request, taken apart; its names and numbers are still text."""

    route: Route
    places: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By lower-case name."""

    @property
    def island(self) -> str:
        return require_target_name(self._said("island"), "island")

    @property
    def incarnation(self) -> int:
        return whole_text(self._said("incarnation"), "incarnation")

    @property
    def fragment(self) -> int:
        return whole_text(self._said("fragment"), "fragment", high=MAX_FRAGMENT)

    @property
    def round(self) -> int:
        return whole_text(self._said("round"), "round")

    @property
    def digest(self) -> str:
        said = self._said("digest")
        if not is_digest(said):
            raise wrong("digest", said, "64 hex digits in lower case")
        return said

    @property
    def first(self) -> int:
        return whole_text(self._said("first"), "first")

    @property
    def wait_s(self) -> float:
        return seconds_text(self.query.get("wait_s", "0"), "wait_s")

    @cached_property
    def beat(self) -> Beat | None:
        """The beat that rides on the request."""
        said = self.headers.get(BEAT_HEADER.lower())
        if said is None:
            return None
        data = said.encode(errors="replace")
        return BEAT.read(load(data, what=BEAT_HEADER, most=MAX_BEAT_BYTES), "beat")

    @cached_property
    def claim(self) -> Claim | None:
        """The life of an island that the request speaks for; None if it only reads.

        Whatever else the head names must be the same life.
        """
        island, proof = None, self.route.proof
        if proof is Proof.ALWAYS:
            island = self.island
        elif proof is Proof.WITH_BEAT and self.beat is not None:
            island = self.beat.island
        if island is None:
            return None
        claim = read_claim(island, self.headers.get(PROOF_HEADER.lower()))
        if "incarnation" in self.route.query:
            require_claimed(claim, Identity(island, self.incarnation))
        return claim

    def _said(self, key: str) -> str:
        said = self.places.get(key, self.query.get(key))
        if said is None:
            raise UsageError(f"The query must say {key!r}. {SEE}")
        return said


def asked(method: str, target: str, headers: Mapping[str, str]) -> Asked | None:
    """Return what a request asks for, or None when there is no such route.

    Raises:
        UsageError: the target or the query is wrong, or another protocol is spoken.
    """
    parts, query = split_target(target)
    for route in ROUTES:
        places = route.places(parts) if route.method == method else None
        if places is None:
            continue
        for key in query.keys() - route.query:
            raise UsageError(f"{shown(key)} is unknown in this query. {SEE}")
        if route.name != "info":
            _require_protocol(headers)
        _require_type(route, headers)
        return Asked(route=route, places=places, query=query, headers=headers)
    return None


def whole_text(said: str, where: str, *, high: int = U64_MAX) -> int:
    """Return a whole number, which has one spelling."""
    if not _DECIMAL.fullmatch(said) or int(said) > high:
        raise wrong(where, said, f"a whole number from 0 to {high}, in decimal")
    return int(said)


def seconds_text(said: str, where: str) -> float:
    """Return a number of seconds that a question may wait."""
    if not _SECONDS.fullmatch(said) or float(said) > MAX_WAIT_S:
        raise wrong(where, said, f"a number of seconds from 0 to {MAX_WAIT_S}")
    return float(said)


def read_receipt(headers: Mapping[str, str], name: str) -> bytes:
    """Return the receipt in a header, by lower-case name; empty: there is none.

    Raises:
        UsageError: the header holds something else.
    """
    text = headers.get(name.lower())
    return b"" if text is None else _RECEIPT.read(text, name)


def read_receipts(headers: Mapping[str, str], name: str, *, most: int) -> list[bytes]:
    """Return the receipts of a header, in order, and not more than `most`.

    Raises:
        UsageError: the header holds something else, or more.
    """
    text = headers.get(name.lower())
    entries = text.split(",", most) if text else []
    if len(entries) > most:
        raise wrong(name, text, f"at most {most} receipts")
    return [_RECEIPT.read(entry.strip(), name) for entry in entries]


def _require_protocol(headers: Mapping[str, str]) -> None:
    said = headers.get(PROTOCOL_HEADER.lower(), "")
    if said != str(PROTOCOL):
        raise UsageError(
            f"The caller speaks protocol {shown(said)}, and this coordinator "
            f"{PROTOCOL}. Run the same version of Atoll on both sides."
        )


def _require_type(route: Route, headers: Mapping[str, str]) -> None:
    said = headers.get("content-type", "").partition(";")[0].strip().lower()
    if route.takes is not Takes.NOTHING and said != route.takes.value:
        raise UsageError(
            f"Content-Type {shown(said)} must be {route.takes.value!r} here. {SEE}"
        )


def require_run(headers: Mapping[str, str], run: str) -> None:
    """Return when a call is meant for this run, or does not say for which.

    Raises:
        Unreachable: another run was meant. Its coordinator may come back at this
            address, so the island keeps its work and asks again.
    """
    said = headers.get(RUN_HEADER.lower())
    if said is not None and decoded(said) != run:
        raise Unreachable(
            f"This call is for run {shown(decoded(said))}, and this coordinator has "
            f"run {run!r}. Check the address, or wait for that run's coordinator."
        )
