"""The JSON forms of the messages between islands and a run, apart from frames.

Settings travel complete:

Rule 1: each setting that this version knows is in `settings` or in `not_set`.
Rule 2: a setting that is in neither is unknown to the coordinator, and a setting that
        is unknown here would have no effect: both are refused by name.
Rule 3: no value is taken from a default, except in data that an earlier version has
        stored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args

from atoll import protocol
from atoll.data import Ask, Claim, DataSpec, Spans
from atoll.data.ledger import MAX_WANT
from atoll.data.spans import MAX_TURN
from atoll.errors import CorruptError, SettingsError, UsageError
from atoll.exchange.api.bodies import (
    FLAG,
    LANGUAGE,
    MAX_LARGE_BYTES,
    NAME,
    SEE,
    dump,
    hexed,
    integer,
    listed,
    maybe,
    number,
    option,
    require_table,
    row,
    table,
    text,
    wrong,
)
from atoll.exchange.calls import JoinCall
from atoll.fields import U64_MAX, JsonField, shown
from atoll.protocol.messages import CountedWork
from atoll.protocol.model import Role
from atoll.settings import RunSettings
from atoll.settings.run_file import SECTIONS
from atoll.wire import blake3_digest
from atoll.wire.frame import RECEIPT_BYTES
from atoll.wire.header import BASE_BYTES, MAX_FRAGMENT

SETTINGS_KEYS = frozenset({"settings", "not_set"})

_UPGRADE = "Run the same version of Atoll at the coordinator and here."
_MAX_KEYS = 1024
_NOT_SET = listed(text(128), max_items=_MAX_KEYS)

ALL_SETTINGS = frozenset(
    f"{section}.{field.name}"
    for section, kind in SECTIONS.items()
    for field in fields(kind)
)
"""The dotted keys of all settings."""


def settings_form(settings: RunSettings) -> dict[str, Any]:
    """Return every value that is set, by table, and the names of all others."""
    tables = settings.to_dict()
    return {"settings": tables, "not_set": sorted(ALL_SETTINGS - set(_dotted(tables)))}


def read_settings(value: object, path: str) -> RunSettings:
    """Return the settings that a coordinator has sent.

    Raises:
        SettingsError: one is missing, unknown or wrong; it is named.
        UsageError: this is no form of settings.
    """
    tables, not_set = _read_form(value, path)
    settings = RunSettings.from_dict(tables)
    _require_complete(settings, frozenset(_dotted(tables)), not_set)
    return settings


def read_stored_settings(value: object, path: str) -> RunSettings:
    """Return the settings of a run that an earlier version may have written.

    A setting that it did not know has its default. The run's fingerprint covers all
    that can never change, so that a wrong default of one of those is found by it.

    Raises:
        SettingsError: one is unknown or wrong; it is named.
        UsageError: this is no form of settings.
    """
    return RunSettings.from_dict(_read_form(value, path)[0])


def _read_form(
    value: object, path: str
) -> tuple[dict[str, dict[str, Any]], frozenset[str]]:
    """Return the values that are set, by table, and the names of the others."""
    form = require_table(value, path)
    tables = _tables(form.get("settings"), f"{path}.settings")
    not_set = frozenset(_NOT_SET.read(form.get("not_set"), f"{path}.not_set"))
    _require_known(frozenset(_dotted(tables)) | not_set)
    return tables, not_set


def _tables(value: object, path: str) -> dict[str, dict[str, Any]]:
    tables = require_table(value, path)
    for name, values in tables.items():
        for key, setting in require_table(values, f"{path}.{shown(name)}").items():
            if setting is None:
                raise wrong(f"{path}.{shown(f'{name}.{key}')}", setting, "set")
    return tables


def _dotted(tables: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, values in tables.items():
        for key in values:
            yield f"{name}.{key}"


def _require_known(keys: frozenset[str]) -> None:
    for key in sorted(keys - ALL_SETTINGS):
        raise SettingsError(
            f"The coordinator has a setting {shown(key)}, which is unknown to this "
            f"version of Atoll. {_UPGRADE}"
        )


def _require_complete(
    settings: RunSettings, keys: frozenset[str], not_set: frozenset[str]
) -> None:
    """Refuse a key in neither list, and one that is in the wrong list."""
    for key in sorted(ALL_SETTINGS - keys - not_set):
        raise SettingsError(
            f"The coordinator did not send {key!r}, which this version of Atoll "
            f"needs. {_UPGRADE}"
        )
    in_force = frozenset(_dotted(settings.to_dict()))
    for key in sorted((in_force & not_set) | (keys - in_force)):
        raise SettingsError(
            f"The coordinator did not state whether {key!r} is set, and must. "
            f"{_UPGRADE}"
        )


MAX_FRAGMENTS = 65_536
MAX_ISLANDS = 65_536
MAX_TENSORS = 65_536
MAX_TENSOR_NAME_BYTES = 512
MAX_DIMENSIONS = 64
MAX_KEY_BYTES = 64
MAX_STEP_S = 2.0**40

_SIZE_MAX = 2**63 - 1
_FRAGMENT = integer(0, MAX_FRAGMENT)
_FRAGMENTS = listed(_FRAGMENT, max_items=MAX_FRAGMENTS)

COUNTED = row(
    CountedWork,
    {"round": integer(), "inner_steps": integer(), "tokens": integer()},
    last={"listed": integer()},
)
RECEIPT = hexed(RECEIPT_BYTES, RECEIPT_BYTES)
HOLDING = row(
    protocol.HeldRound,
    {"round": integer(), "digest": hexed(BASE_BYTES, BASE_BYTES)},
    last={"receipt": RECEIPT},
)
HOLDINGS = listed(HOLDING, max_items=MAX_FRAGMENTS)

# Statistics are added up over islands: sums must stay finite and readable.
_SHOWN = integer(0, _SIZE_MAX)
_SECONDS = number(0.0, 2.0**40)
_RATE = number(0.0, 2.0**60)
WINDOW = integer(1, 2**31 - 1)
MAX_MACHINE_BYTES = 80

MAX_METRICS, MAX_METRIC_NAME_BYTES = 16, 64
_METRIC_VALUES = LANGUAGE.mapping(number(-sys.float_info.max))


def _read_metrics(value: object, path: str) -> dict[str, float]:
    metrics = _METRIC_VALUES.read(value, path)
    longest = max((len(name.encode()) for name in metrics), default=0)
    if len(metrics) > MAX_METRICS or longest > MAX_METRIC_NAME_BYTES:
        raise LANGUAGE.fault(
            f"{path} has {len(metrics)} metrics, the longest name {longest} bytes. At "
            f"most {MAX_METRICS} are sent, with names of {MAX_METRIC_NAME_BYTES} bytes."
        )
    return metrics


METRICS = JsonField(_METRIC_VALUES.write, _read_metrics)

STATS = table(
    protocol.Stats,
    {
        "version": text(64),
        "seconds": _SECONDS,
        "inner_steps": _SHOWN,
        "tokens": _SHOWN,
        "loss": maybe(number(-sys.float_info.max)),
        "wait_s": _SECONDS,
        "bytes_up": _SHOWN,
        "bytes_down": _SHOWN,
    },
    optional={
        "first_batch": text(64),
        "dropped_steps": integer(1, _SIZE_MAX),
        "loss_is_finite": FLAG,
        "metrics": METRICS,
        "anchor_metrics": METRICS,
        "anchor_round": _SHOWN,
        "exchange_s": _SECONDS,
        "hidden_s": _SECONDS,
        "up_bytes_per_s": _RATE,
        "down_bytes_per_s": _RATE,
        "rtt_s": _SECONDS,
        "carried": integer(1, _SIZE_MAX),
        "dropped": integer(1, _SIZE_MAX),
        "store_usd": _SECONDS,
        "machine": text(MAX_MACHINE_BYTES),
    },
)

BEAT = table(
    protocol.Heartbeat,
    {
        "island": NAME,
        "incarnation": integer(),
        "step": integer(),
        "waits_for": maybe(listed(integer(), min_items=2, max_items=2)),
        "holds": HOLDINGS,
        "stats": maybe(STATS),
    },
    optional={"step_s": number(0.0, MAX_STEP_S, is_low_open=True)},
)

POSITION = table(
    protocol.Position,
    {
        "step": integer(),
        "rounds": listed(integer(), max_items=MAX_FRAGMENTS),
        "last_round": maybe(integer()),
        # A sum: one island that reports 2^64 - 1 must not make it unreadable for all.
        "tokens": integer(0, MAX_ISLANDS * U64_MAX),
        "wanted": _FRAGMENTS,
        "lost": _FRAGMENTS,
        "saves": integer(),
    },
    optional={
        "decay_round": integer(1),
        "end_tokens": integer(1),
        "last_rounds": listed(integer(), max_items=MAX_FRAGMENTS),
    },
)

_HEX = hexed(0, 64)
_DIGEST = JsonField(str, lambda value, path: _HEX.read(value, path).hex())

TENSOR = row(
    protocol.TensorSpec,
    {
        "name": text(MAX_TENSOR_NAME_BYTES, min_bytes=1),
        "shape": listed(integer(0, _SIZE_MAX), max_items=MAX_DIMENSIONS),
        "dtype": text(32, min_bytes=1),
        "role": option(*get_args(Role)),
        "digest": _DIGEST,
    },
)
_TENSORS = listed(TENSOR, max_items=MAX_TENSORS)


def _read_model(value: object, path: str) -> protocol.ModelSpec:
    tensors = _TENSORS.read(value, path)
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise UsageError(f"{path} names {shown(tensor.name)} twice. {SEE}")
        seen.add(tensor.name)
    return protocol.ModelSpec(tensors)


MODEL = JsonField(lambda model: _TENSORS.write(model.tensors), _read_model)

_JOIN: JsonField[dict[str, Any]] = table(
    dict,
    {
        "key": hexed(1, MAX_KEY_BYTES, is_secret=True),
        "nonce": hexed(1, MAX_KEY_BYTES, is_secret=True),
        "incarnation": maybe(integer()),
        "after": integer(),
        "returns": FLAG,
        "bundle": _DIGEST,
        "model": MODEL,
    },
    optional={"holds": HOLDINGS},
)


def join_form(call: JoinCall) -> dict[str, Any]:
    """Return the JSON of a join, without the island's name, which is in the path."""
    request = call.request
    holds = {"holds": HOLDINGS.write(request.holds)} if request.holds else {}
    return holds | {
        "key": call.key.hex(),
        "nonce": call.nonce.hex(),
        "incarnation": request.incarnation,
        "after": request.after,
        "returns": request.returns,
        "bundle": request.bundle,
        "model": MODEL.write(request.model),
    }


def read_join(value: object, *, island: str | None) -> JoinCall:
    """Return the join call of a form; `island` is the name in the path, if any."""
    fields = _JOIN.read(value, "join")
    key, nonce = fields.pop("key"), fields.pop("nonce")
    return JoinCall(protocol.JoinRequest(island=island, **fields), key, nonce)


_JOINED: dict[str, JsonField[Any]] = {
    "run": NAME,
    "island": NAME,
    "incarnation": integer(),
    "slot": integer(),
    "epoch": integer(),
    "position": POSITION,
    "is_founder": FLAG,
    "inner_steps": integer(),
    "tokens": integer(),
    "spoken_for": _FRAGMENTS,
    "counted": listed(maybe(COUNTED), max_items=MAX_FRAGMENTS),
}
_WINDOW_KEY = "window"
"""Omitted by a run whose islands all make `sync_every` inner steps per window."""

MAX_HELD_BYTES = 2**20
"""The largest set of turns in one message, packed."""

_JOINED_LAST: dict[str, JsonField[Any]] = {
    _WINDOW_KEY: WINDOW,
    "held_rows": hexed(1, MAX_HELD_BYTES),
    "last_claim": integer(1),
}
"""Omitted if empty: a run that has none of these writes the reply of before."""

_JOINED_FIELDS: JsonField[dict[str, Any]] = table(dict, _JOINED, optional=_JOINED_LAST)


def join_reply_form(reply: protocol.JoinReply) -> dict[str, Any]:
    """Return the JSON of the reply to a join, with all settings."""
    form = {key: rule.write(getattr(reply, key)) for key, rule in _JOINED.items()}
    last = {
        key: rule.write(getattr(reply, key))
        for key, rule in _JOINED_LAST.items()
        if getattr(reply, key)
    }
    return form | last | settings_form(reply.settings)


def read_join_reply(value: object, path: str) -> protocol.JoinReply:
    """Return the reply to a join.

    Raises:
        SettingsError: the run's settings are not those that this version knows.
        UsageError: a field is wrong.
    """
    form = dict(require_table(value, path))
    settings = read_settings(
        {key: form.pop(key) for key in SETTINGS_KEYS & form.keys()}, path
    )
    reply = protocol.JoinReply(settings=settings, **_JOINED_FIELDS.read(form, path))
    if reply.window > settings.sync.sync_every:
        needed = f"at most sync.sync_every={settings.sync.sync_every}"
        raise wrong(f"{path}.{_WINDOW_KEY}", reply.window, needed)
    return reply


def _read_spans(value: object, path: str) -> Spans:
    packed = _PACKED.read(value, path)
    try:
        return Spans.unpack(packed)
    except CorruptError as exc:
        raise UsageError(f"{path} is no set of turns: {exc}") from exc


_PACKED = hexed(0, MAX_HELD_BYTES)
SPANS: JsonField[Spans] = JsonField(lambda spans: spans.pack().hex(), _read_spans)
"""A set of turns, packed, in hex."""

MAX_FINGERPRINT_BYTES = 256
DATA = table(
    DataSpec,
    {
        "rows": maybe(integer(0, MAX_TURN)),
        "fingerprint": text(MAX_FINGERPRINT_BYTES),
    },
)
CLAIM = table(Claim, {"spans": SPANS, "is_over": FLAG})

_ASK: JsonField[dict[str, int]] = table(
    dict,
    {
        "number": integer(1),
        "want": integer(1, MAX_WANT),
        "start": integer(0, MAX_TURN),
    },
)


def ask_form(ask: Ask) -> dict[str, Any]:
    """Return the JSON of a claim, without its island, which is in the query."""
    return {"number": ask.number, "want": ask.want, "start": ask.start}


def read_ask(value: object, *, island: str, incarnation: int) -> Ask:
    """Return the claim of a form."""
    return Ask(island=island, incarnation=incarnation, **_ASK.read(value, "claim"))


def model_fingerprint(
    model: protocol.ModelSpec | None, *, bundle: str | None = None
) -> str:
    """Return a digest of every name, shape, dtype, role and constant, in hex.

    The digest covers the bundle that defines the model, if there is one: a file that
    was edited is another model. Empty while the run has no weights and so no model.
    """
    if model is None:
        return ""
    data = dump(MODEL.write(model), name="model", max_bytes=MAX_LARGE_BYTES)
    return blake3_digest(data + (bundle or "").encode()).hex()
