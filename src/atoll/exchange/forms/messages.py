"""The forms of what islands and a run say to each other, apart from frames."""

from __future__ import annotations

import sys
from typing import Any, get_args

from atoll.errors import UsageError
from atoll.exchange.calls import JoinCall
from atoll.exchange.forms.fields import (
    FLAG,
    NAME,
    U64_MAX,
    Field,
    hexed,
    listed,
    maybe,
    number,
    require_table,
    row,
    table,
    text,
    whole,
    words,
)
from atoll.exchange.forms.tables import SETTINGS_KEYS, read_settings, settings_form
from atoll.exchange.forms.text import MAX_LARGE_BYTES, SEE, dump
from atoll.protocol import (
    Beat,
    Holding,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Stats,
    TensorSpec,
)
from atoll.protocol.counted import Counted
from atoll.protocol.messages import Role
from atoll.settings.rules import shown
from atoll.wire import blake3_digest
from atoll.wire.header import BASE_BYTES, MAX_FRAGMENT
from atoll.wire.receipt import RECEIPT_BYTES

MAX_FRAGMENTS = 65_536
MAX_ISLANDS = 65_536
MAX_TENSORS = 65_536
MAX_TENSOR_NAME_BYTES = 512
MAX_DIMENSIONS = 64
MAX_KEY_BYTES = 64

_SIZE_MAX = 2**63 - 1
_FRAGMENT = whole(0, MAX_FRAGMENT)
_FRAGMENTS = listed(_FRAGMENT, most=MAX_FRAGMENTS)

COUNTED = row(Counted, {"round": whole(), "inner_steps": whole(), "tokens": whole()})
RECEIPT = hexed(RECEIPT_BYTES, RECEIPT_BYTES)
HOLDING = row(
    Holding,
    {"round": whole(), "digest": hexed(BASE_BYTES, BASE_BYTES)},
    last={"receipt": RECEIPT},
)
HOLDINGS = listed(HOLDING, most=MAX_FRAGMENTS)

# Statistics are added up over islands: sums must stay finite and readable.
_SHOWN = whole(0, _SIZE_MAX)
_SECONDS = number(0.0, 2.0**40)

STATS = table(
    Stats,
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
    optional={"first_batch": text(64), "dropped_steps": whole(1, _SIZE_MAX)},
)

BEAT = table(
    Beat,
    {
        "island": NAME,
        "incarnation": whole(),
        "step": whole(),
        "waits_for": maybe(listed(whole(), least=2, most=2)),
        "holds": HOLDINGS,
        "stats": maybe(STATS),
    },
)

POSITION = table(
    Position,
    {
        "step": whole(),
        "rounds": listed(whole(), most=MAX_FRAGMENTS),
        "last_round": maybe(whole()),
        # A sum: one island that says 2^64 - 1 must not make it unreadable for all.
        "tokens": whole(0, MAX_ISLANDS * U64_MAX),
        "wanted": _FRAGMENTS,
        "lost": _FRAGMENTS,
        "saves": whole(),
    },
    optional={"decay_round": whole(1), "end_tokens": whole(1)},
)

_HEX = hexed(0, 64)
_DIGEST = Field(str, lambda value, where: _HEX.read(value, where).hex())

TENSOR = row(
    TensorSpec,
    {
        "name": text(MAX_TENSOR_NAME_BYTES, least=1),
        "shape": listed(whole(0, _SIZE_MAX), most=MAX_DIMENSIONS),
        "dtype": text(32, least=1),
        "role": words(*get_args(Role)),
        "digest": _DIGEST,
    },
)
_TENSORS = listed(TENSOR, most=MAX_TENSORS)


def _read_model(value: object, where: str) -> ModelSpec:
    tensors = _TENSORS.read(value, where)
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise UsageError(f"{where} names {shown(tensor.name)} twice. {SEE}")
        seen.add(tensor.name)
    return ModelSpec(tensors)


MODEL = Field(lambda model: _TENSORS.write(model.tensors), _read_model)

_ASKED: Field[dict[str, Any]] = table(
    dict,
    {
        "key": hexed(1, MAX_KEY_BYTES, is_secret=True),
        "nonce": hexed(1, MAX_KEY_BYTES, is_secret=True),
        "incarnation": maybe(whole()),
        "after": whole(),
        "returns": FLAG,
        "bundle": _DIGEST,
        "model": MODEL,
    },
    optional={"holds": HOLDINGS},
)


def join_form(call: JoinCall) -> dict[str, Any]:
    """Return what a joining says beside the island's name, which is in the path."""
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
    """Return the joining that a form asks for, under a name of the path or none."""
    asked = _ASKED.read(value, "join")
    key, nonce = asked.pop("key"), asked.pop("nonce")
    return JoinCall(JoinRequest(island=island, **asked), key, nonce)


_JOINED: dict[str, Field[Any]] = {
    "run": NAME,
    "island": NAME,
    "incarnation": whole(),
    "slot": whole(),
    "epoch": whole(),
    "position": POSITION,
    "is_founder": FLAG,
    "inner_steps": whole(),
    "tokens": whole(),
    "spoken_for": _FRAGMENTS,
    "counted": listed(maybe(COUNTED), most=MAX_FRAGMENTS),
}
_JOINED_FIELDS: Field[dict[str, Any]] = table(dict, _JOINED)


def join_reply_form(reply: JoinReply) -> dict[str, Any]:
    """Return the whole answer to a joining, settings included."""
    said = {key: rule.write(getattr(reply, key)) for key, rule in _JOINED.items()}
    return said | settings_form(reply.settings)


def read_join_reply(value: object, where: str) -> JoinReply:
    """Return the answer to a joining.

    Raises:
        SettingsError: the run's settings are not those that this version knows.
        UsageError: a field is wrong.
    """
    said = dict(require_table(value, where))
    settings = read_settings(
        {key: said.pop(key) for key in SETTINGS_KEYS & said.keys()}, where
    )
    return JoinReply(settings=settings, **_JOINED_FIELDS.read(said, where))


def model_fingerprint(model: ModelSpec | None, *, bundle: str | None = None) -> str:
    """Return a digest of every name, shape, dtype, role and constant, in hex.

    And of the bundle that defines the model, if there is one: a file that was edited is
    another model. Empty while the run has no weights and so no model.
    """
    if model is None:
        return ""
    said = dump(MODEL.write(model), what="model", most=MAX_LARGE_BYTES)
    return blake3_digest(said + (bundle or "").encode()).hex()
