"""Owns who may talk to a run: certificates, tokens, invites, credentials, the policy.

Does not know what a run is, nor how a request arrives.
Start reading at `policy`, then `tokens`, `invite` and `contexts`.

`certificate` and `authority` are imported by their own names: only who makes
certificates needs the time that loading `cryptography` takes.
"""

from atoll.security.addresses import (
    Address,
    RunUrl,
    is_loopback,
    parse_address,
    parse_run_url,
)
from atoll.security.alerts import certificate_refusal
from atoll.security.audit import Action, Answer, Audit, What
from atoll.security.codes import Codes, MustWait
from atoll.security.contexts import (
    calling_context,
    check_pin,
    fingerprint,
    listening_context,
    parse_pin,
    secured,
)
from atoll.security.credentials import (
    Credential,
    Credentials,
    credentials_directory,
)
from atoll.security.invite import Invite, is_invite, parse_invite
from atoll.security.policy import (
    ROUTES,
    UNLISTED,
    Need,
    Route,
    needed_role,
    require_safe_listening,
    route_of,
)
from atoll.security.secret import Secret
from atoll.security.sparing import Sparing
from atoll.security.tokens import (
    Role,
    Tokens,
    authorization,
    check_token,
    make_token,
    read_token,
    require,
    run_tokens,
    token_file,
)

__all__ = [
    "ROUTES",
    "UNLISTED",
    "Action",
    "Address",
    "Answer",
    "Audit",
    "Codes",
    "Credential",
    "Credentials",
    "Invite",
    "MustWait",
    "Need",
    "Role",
    "Route",
    "RunUrl",
    "Secret",
    "Sparing",
    "Tokens",
    "What",
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
    "needed_role",
    "parse_address",
    "parse_invite",
    "parse_pin",
    "parse_run_url",
    "read_token",
    "require",
    "require_safe_listening",
    "route_of",
    "run_tokens",
    "secured",
    "token_file",
]
