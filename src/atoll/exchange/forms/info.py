"""What a run says of itself to whoever may ask: `GET /info`.

It is the first thing that an island reads, and where versions are compared: `protocol`
stays where it is in every version, and nothing else is read when it differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.errors import SettingsError, UsageError
from atoll.exchange.forms.fields import (
    NAME,
    Field,
    number,
    require_table,
    table,
    text,
    whole,
    words,
)
from atoll.exchange.forms.heads import MAX_BEAT_BYTES, MAX_WAIT_S, PROTOCOL
from atoll.exchange.forms.replies import Answer, json_answer
from atoll.exchange.forms.tables import SETTINGS_KEYS, read_settings, settings_form
from atoll.exchange.forms.text import MAX_LARGE_BYTES, load
from atoll.settings import RunSettings
from atoll.settings.rules import shown
from atoll.wire import MAX_HEADER_BYTES
from atoll.wire.digests import Bytes

AUTHORITY = "run"
"""Who owns the settings: nobody else can be asked for them."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a coordinator takes at most."""

    body_bytes: int
    """Of a frame's body, as `limits.max_body_bytes` has it now."""

    header_bytes: int = MAX_HEADER_BYTES
    json_bytes: int = MAX_LARGE_BYTES
    beat_bytes: int = MAX_BEAT_BYTES
    wait_s: float = MAX_WAIT_S


@dataclass(frozen=True, kw_only=True)
class Info:
    """A run, before one takes part in it."""

    run: str
    version: str
    """Of Atoll, at the coordinator: for messages, never compared."""

    settings: RunSettings
    epoch: int
    model_fingerprint: str
    """Empty until the run is founded."""

    lease_s: float
    heartbeat_s: float
    limits: Limits


_LIMITS = table(
    Limits,
    {
        "body_bytes": whole(),
        "header_bytes": whole(),
        "json_bytes": whole(),
        "beat_bytes": whole(),
        "wait_s": number(),
    },
)
_PLAIN: dict[str, Field[Any]] = {
    "run": NAME,
    "version": text(64, least=1),
    "epoch": whole(),
    "model_fingerprint": text(64),
    "lease_s": number(),
    "heartbeat_s": number(),
    "limits": _LIMITS,
}
_SAID: Field[dict[str, Any]] = table(
    dict,
    {
        "protocol": whole(),
        "settings_authority": words(AUTHORITY),
        "fingerprint": text(128),
        **_PLAIN,
    },
)


def info_form(info: Info) -> dict[str, Any]:
    """Return the whole form: every setting is in it, and nothing is null."""
    said = {key: rule.write(getattr(info, key)) for key, rule in _PLAIN.items()}
    return {
        "protocol": PROTOCOL,
        "settings_authority": AUTHORITY,
        **said,
        "fingerprint": info.settings.fingerprint,
        **settings_form(info.settings),
    }


def info_parts(info: Info) -> Answer:
    """Return the answer to `GET /info`."""
    return json_answer(info_form(info), what="info")


def parse_info(data: Bytes) -> Info:
    """Return what a run says of itself.

    Raises:
        SettingsError: a setting is missing, unknown here or means something else; it
            is named.
        UsageError: this is no coordinator, or one that speaks another protocol.
    """
    said = dict(require_table(load(data, what="info", most=MAX_LARGE_BYTES), "info"))
    _require_protocol(said)
    settings = read_settings(
        {key: said.pop(key) for key in SETTINGS_KEYS & said.keys()}, "info"
    )
    found = _SAID.read(said, "info")
    _require_fingerprint(settings, found["fingerprint"])
    info = Info(settings=settings, **{key: found[key] for key in _PLAIN})
    if not 0.0 < info.heartbeat_s < info.lease_s:
        raise UsageError(
            f"info.heartbeat_s={info.heartbeat_s} must be above 0 and below "
            f"info.lease_s={info.lease_s}. Run a coordinator that is not altered."
        )
    return info


def _require_protocol(said: dict[str, Any]) -> None:
    spoken = said.get("protocol")
    if spoken is None:
        raise UsageError(
            "What answers at this address does not say which protocol it speaks: it is "
            "no coordinator of Atoll. Check the address."
        )
    if spoken != PROTOCOL or type(spoken) is not int:
        raise UsageError(
            f"The coordinator speaks protocol {shown(spoken)} (Atoll "
            f"{shown(said.get('version'))}), and this island {PROTOCOL}. "
            "Run the same version of Atoll on both sides."
        )


def _require_fingerprint(settings: RunSettings, said: str) -> None:
    """Refuse settings that look the same and are not: a default that has moved."""
    if settings.fingerprint != said:
        raise SettingsError(
            f"The run's settings have fingerprint {shown(said)} at the coordinator and "
            f"{settings.fingerprint} here: they mean something else to this version of "
            "Atoll. Run the same version on both sides."
        )
