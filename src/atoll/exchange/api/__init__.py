"""Owns how calls and replies travel over HTTP: bytes in, values out, and back.

Does not know sockets, nor what a call does.
Start reading at `atoll.routes`, then `requests` and `replies`; docs/http.md is the
law.
"""

from atoll.exchange.api.bodies import MAX_LARGE_BYTES, MAX_SMALL_BYTES, Incoming, Read
from atoll.exchange.api.messages import model_fingerprint
from atoll.exchange.api.replies import (
    FAILURES,
    EncodedReply,
    Failure,
    Info,
    Limits,
    error_parts,
    info_parts,
    json_answer,
    not_found_reply,
    parse_info,
    parse_reply,
    receipt_headers,
    reply_parts,
)
from atoll.exchange.api.request_head import (
    MAX_BEAT_BYTES,
    PROOF_HEADER,
    PROTOCOL,
    Identity,
    IdentityClaim,
    Proofs,
    RequestHead,
    identities_of,
    proof_text,
    read_head,
    require_run,
)
from atoll.exchange.api.requests import (
    EncodedRequest,
    Upload,
    apart,
    parse_call,
    parse_upload,
    to_request,
)

__all__ = [
    "FAILURES",
    "MAX_BEAT_BYTES",
    "MAX_LARGE_BYTES",
    "MAX_SMALL_BYTES",
    "PROOF_HEADER",
    "PROTOCOL",
    "EncodedReply",
    "EncodedRequest",
    "Failure",
    "Identity",
    "IdentityClaim",
    "Incoming",
    "Info",
    "Limits",
    "Proofs",
    "Read",
    "RequestHead",
    "Upload",
    "apart",
    "error_parts",
    "identities_of",
    "info_parts",
    "json_answer",
    "model_fingerprint",
    "not_found_reply",
    "parse_call",
    "parse_info",
    "parse_reply",
    "parse_upload",
    "proof_text",
    "read_head",
    "receipt_headers",
    "reply_parts",
    "require_run",
    "to_request",
]
