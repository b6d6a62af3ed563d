"""Owns how calls and replies travel over HTTP: bytes in, values out, and back.

Does not know sockets, nor what a call does.
Start reading at `routes.ROUTES`, then `requests` and `replies`; docs/http.md is the
law.
"""

from atoll.exchange.forms.failures import FAILURES, Failure
from atoll.exchange.forms.frames import Incoming, Read
from atoll.exchange.forms.heads import (
    MAX_BEAT_BYTES,
    PROTOCOL,
    Asked,
    asked,
    require_run,
)
from atoll.exchange.forms.identities import (
    PROOF_HEADER,
    Claim,
    Identity,
    Proofs,
    identities_of,
    proof_text,
)
from atoll.exchange.forms.info import Info, Limits, info_parts, parse_info
from atoll.exchange.forms.messages import model_fingerprint
from atoll.exchange.forms.replies import (
    Answer,
    error_parts,
    json_answer,
    nowhere_parts,
    parse_reply,
    receipt_headers,
    reply_parts,
)
from atoll.exchange.forms.requests import (
    Sent,
    Upload,
    apart,
    parse_call,
    parse_upload,
    to_request,
)
from atoll.exchange.forms.routes import ROUTES, Proof, Route, Takes, methods_of
from atoll.exchange.forms.text import MAX_LARGE_BYTES, MAX_SMALL_BYTES

__all__ = [
    "FAILURES",
    "MAX_BEAT_BYTES",
    "MAX_LARGE_BYTES",
    "MAX_SMALL_BYTES",
    "PROOF_HEADER",
    "PROTOCOL",
    "ROUTES",
    "Answer",
    "Asked",
    "Claim",
    "Failure",
    "Identity",
    "Incoming",
    "Info",
    "Limits",
    "Proof",
    "Proofs",
    "Read",
    "Route",
    "Sent",
    "Takes",
    "Upload",
    "apart",
    "asked",
    "error_parts",
    "identities_of",
    "info_parts",
    "json_answer",
    "methods_of",
    "model_fingerprint",
    "nowhere_parts",
    "parse_call",
    "parse_info",
    "parse_reply",
    "parse_upload",
    "proof_text",
    "receipt_headers",
    "reply_parts",
    "require_run",
    "to_request",
]
