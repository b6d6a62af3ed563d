"""`atoll join RUN -- COMMAND...`: run a command as an island."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from atoll import security
from atoll.cli.run_names import StoreUrl, complete_run_name, locate_run
from atoll.errors import Refused, UsageError
from atoll.exchange.api import Info
from atoll.http import HttpClient
from atoll.island.connection import (
    CONNECT_S,
    SILENCE_S,
    connect_read_only,
    wait_until_up,
)
from atoll.island.environment import (
    credentials_from_environment,
    definitions_from_environment,
)
from atoll.run_client.coordinator import CoordinatorClient, credential_paths_for
from atoll.run_client.location import RunNames
from atoll.runtime import SystemClock, SystemRuntime

CONSENT = "ATOLL_TRUST_CODE"


def join(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Invitation; or URL, directory or name of a run.",
            autocompletion=complete_run_name,
            show_default=False,
        ),
    ],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND",
            help="Training program; script.py means python script.py.",
            show_default=False,
        ),
    ],
    island: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the island. Default: chosen by the run."
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of atoll certify, if the run requires one; remembered.",
        ),
    ] = None,
    trust_code: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            help="Trust the code of the run's bundle, if it has this digest.",
        ),
    ] = None,
) -> None:
    """Run a command as an island of a run.

    An invitation is redeemed once, and its credentials are remembered for this user. A
    run in a store needs none. Then COMMAND replaces this process, with ATOLL_RUN,
    ATOLL_ISLAND and ATOLL_CERTIFICATE set: it receives the signals, and its exit code
    is the exit code of `atoll join`.

    If the run's bundle has code, `atoll join` asks once at the terminal whether the
    code may run, and passes the answer to COMMAND in ATOLL_TRUST_CODE.
    """
    _require_one_certificate(certificate)
    location = None if security.is_invite(run) else locate_run(run)
    environment = dict(os.environ)
    if isinstance(location, StoreUrl):
        bundle = _require_joinable(location, certificate)
        environment["ATOLL_RUN"] = location.url
    else:
        url = (
            _with_certificate(location, certificate)
            if location is not None
            else _accept_invite(security.parse_invite(run), certificate)
        )
        bundle = _info(url).settings.run.bundle
        environment |= {"ATOLL_RUN": str(url), **_certificate_variables(url)}
    if island is not None:
        environment["ATOLL_ISLAND"] = island
    environment |= _consent(environment["ATOLL_RUN"], bundle, trust_code)
    _execute(_full_command(command), environment)


def _consent(run: str, bundle: str | None, trusted: str | None) -> dict[str, str]:
    """Return the variable with the user's consent to the run's code, asking for it.

    Raises:
        Refused: the run's bundle is not the trusted one.
    """
    if trusted is not None:
        if trusted != bundle:
            actual = f"its bundle is {bundle}" if bundle else "it has no bundle"
            raise Refused(
                f"--trust-code is {trusted}, and the run has other code: {actual}. "
                "Read that first."
            )
        return {CONSENT: trusted}
    from atoll.island.model_definition import (
        DENIED,
        ask_consent,
        is_at_terminal,
        is_trusted,
    )

    if bundle is None or not is_at_terminal():
        return {}
    from atoll.island.model_definition import definition_of

    definition, policy = definition_of(run), definitions_from_environment()
    if not definition.bundle.code or policy.consent is not None:
        return {}
    may_run = is_trusted(definition.bundle, policy) or ask_consent(definition, policy)
    return {CONSENT: bundle if may_run else DENIED}


def _require_joinable(location: StoreUrl, certificate: Path | None) -> str | None:
    """Return the bundle of a run in a store, and remember the run's name.

    Raises:
        UsageError: the store has no run, or lacks a capability for it.
        StoreDenied: a permission is missing.
    """
    from atoll.exchange.bucket import BucketReader
    from atoll.exchange.bucket.create import reliable, require_able, require_there

    if certificate is not None:
        raise UsageError(
            "--certificate is for a coordinator, and this run is in a store, whose "
            "own credentials apply. Leave it out."
        )
    require_there(location.url)
    runtime = SystemRuntime()
    try:
        store = reliable(location.url, runtime.sleep)
        reader = BucketReader.open(store, runtime, url=location.url)
        require_able(store, reader.view.settings, url=location.url)
    finally:
        runtime.close()
    RunNames(credentials_from_environment()).remember(reader.run, location.url)
    return reader.view.settings.run.bundle


def _require_one_certificate(certificate: Path | None) -> None:
    variable = credentials_from_environment().certificate
    if certificate is not None and variable is not None:
        raise UsageError(
            f"--certificate is {certificate}, and ATOLL_CERTIFICATE is {variable}. "
            "Give one of them."
        )


def _certificate_variables(url: security.RunUrl) -> dict[str, str]:
    """Return the variables that give the command this user's certificate."""
    paths = credential_paths_for(url)
    if paths.certificate is None:
        return {}
    key = paths.certificate_key or paths.certificate
    return {
        "ATOLL_CERTIFICATE": str(paths.certificate.absolute()),
        "ATOLL_CERTIFICATE_KEY": str(key.absolute()),
    }


def _with_certificate(
    url: security.RunUrl, certificate: Path | None
) -> security.RunUrl:
    if certificate is not None:
        credential = _credentials().find(str(url))
        _remember(url, credential.pin if credential else None, certificate)
    return url


def _accept_invite(
    invite: security.Invite, certificate: Path | None
) -> security.RunUrl:
    """Return the URL of an invitation's run, and remember the run's token.

    An invitation that was redeemed on this machine before is not redeemed again.
    """
    if certificate is not None:
        _remember(invite.url, invite.pin, certificate)
    if not _is_member(invite):
        _redeem(invite)
        _require_run(_info(invite.url), invite)
    RunNames(credentials_from_environment()).remember(invite.run, str(invite.url))
    return invite.url


def _remember(url: security.RunUrl, pin: str | None, certificate: Path) -> None:
    """Remember a certificate for this run."""
    security.calling_context(
        pin, certificate=certificate
    )  # raises if the file is wrong
    _credentials().remember(str(url), pin=pin, tokens={}, certificate=certificate)


def _credentials() -> security.Credentials:
    return security.Credentials(credentials_from_environment().credentials)


def _is_member(invite: security.Invite) -> bool:
    credential = _credentials().find(str(invite.url))
    if credential is None or credential.pin != invite.pin or not credential.tokens:
        return False
    try:
        return _info(invite.url).run == invite.run
    except Refused:
        return False


def _redeem(invite: security.Invite) -> None:
    paths = credential_paths_for(invite.url)
    http_client = HttpClient(
        invite.address.host,
        invite.address.port,
        timeout_s=SILENCE_S,
        connect_timeout_s=CONNECT_S,
        tls=security.calling_context(
            invite.pin,
            certificate=paths.certificate,
            key=paths.certificate_key,
        ),
        pin=invite.pin,
    )
    with CoordinatorClient(
        invite.url, http_client, certificate=paths.certificate
    ) as client:
        wait_until_up(
            http_client,
            invite.url,
            certificate=paths.certificate,
            clock=SystemClock(),
        )
        reply = client.post("/invites/redeem", {"code": invite.code.reveal()})
    token = security.check_token(str(reply["token"]))
    _credentials().remember(
        str(invite.url), pin=invite.pin, tokens={security.Role.ISLAND: token}
    )


def _info(url: security.RunUrl) -> Info:
    """Return the run's description, once its coordinator is up.

    Waits as long as an island does, and prints that it waits; Ctrl-C ends it.
    """
    http_client, _, info = connect_read_only(
        str(url), paths=credential_paths_for(url), clock=SystemClock()
    )
    http_client.close()
    return info


def _require_run(info: Info, invite: security.Invite) -> None:
    if info.run != invite.run:
        raise Refused(
            f"{invite.url} serves run {info.run!r}, and the invitation is for "
            f"{invite.run!r}. Ask for a new one."
        )


def _full_command(command: Sequence[str]) -> list[str]:
    first = command[0]
    return [sys.executable, *command] if first.endswith(".py") else list(command)


def _execute(command: list[str], environment: dict[str, str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as exc:
        raise UsageError(
            f"{command[0]!r} cannot be run: {exc.strerror}. Write the command after "
            "--, for example: atoll join RUN -- python train.py"
        ) from exc
