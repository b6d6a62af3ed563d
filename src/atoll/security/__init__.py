"""Owns the access to a run: certificates, tokens, invites, credentials, the policy.

Does not know the contents of a run, nor how a request arrives.
Start reading at `tokens`, then `invite` and `tls`.

`certificates` is imported by its own name: loading `cryptography` takes time, and only
code that makes certificates needs it.
"""

from atoll.routes import Role
from atoll.security.addresses import (
    Address,
    RunUrl,
    is_loopback,
    parse_address,
    parse_run_url,
)
from atoll.security.audit import (
    AuditAction,
    AuditAnswer,
    AuditEvent,
    AuditKind,
    RateLimiter,
)
from atoll.security.credentials import (
    Credential,
    Credentials,
    credentials_directory,
)
from atoll.security.invite import Invite, is_invite, parse_invite
from atoll.security.tls import (
    calling_context,
    certificate_refusal,
    check_pin,
    fingerprint,
    listening_context,
    parse_pin,
    secured,
)
from atoll.security.tokens import (
    MustWait,
    OneTimeCodes,
    Secret,
    Tokens,
    authorization,
    check_token,
    make_token,
    read_token,
    require,
    require_safe_listening,
    run_tokens,
    token_file,
)

__all__ = [
    "Address",
    "AuditAction",
    "AuditAnswer",
    "AuditEvent",
    "AuditKind",
    "Credential",
    "Credentials",
    "Invite",
    "MustWait",
    "OneTimeCodes",
    "RateLimiter",
    "Role",
    "RunUrl",
    "Secret",
    "Tokens",
    "authorization",
    "calling_context",
    "certificate_refusal",
    "check_pin",
    "check_token",
    "credentials_directory",
    "fingerprint",
    "is_invite",
    "is_loopback",
    "listening_context",
    "make_token",
    "parse_address",
    "parse_invite",
    "parse_pin",
    "parse_run_url",
    "read_token",
    "require",
    "require_safe_listening",
    "run_tokens",
    "secured",
    "token_file",
]
