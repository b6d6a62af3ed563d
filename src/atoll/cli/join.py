"""`atoll join RUN -- COMMAND...`: run a command as an island."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.coordinator_client import Asking, surroundings_for
from atoll.cli.run_names import Names, StoreUrl, complete, place_of
from atoll.clock import SystemClock
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
    definitions_from_environment,
    surroundings_from_environment,
)
from atoll.security import (
    Credentials,
    Invite,
    Role,
    RunUrl,
    calling_context,
    check_token,
    is_invite,
    parse_invite,
)

CONSENT = "ATOLL_TRUST_CODE"


def join(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="An invitation; or a URL, a directory of a run, or a name.",
            autocompletion=complete,
            show_default=False,
        ),
    ],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND",
            help="What trains; a bare script.py is python script.py.",
            show_default=False,
        ),
    ],
    island: Annotated[
        str | None, typer.Option(metavar="NAME", help="The run gives one without.")
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What atoll certify wrote, if the run asks; it is remembered.",
        ),
    ] = None,
    trust_code: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            help="Let the code of the run's bundle run, if it is this.",
        ),
    ] = None,
) -> None:
    """Run a command as an island of a run.

    An invitation is redeemed once, and what it gave is remembered for this user. A run
    in a store needs none. Then the command takes the place of this process, with
    ATOLL_RUN, ATOLL_ISLAND and ATOLL_CERTIFICATE set: signals reach it, and its exit
    code is its own.

    If the run's bundle has code, a person at the terminal is asked once whether it may
    run; ATOLL_TRUST_CODE tells the command.
    """
    _require_one(certificate)
    place = None if is_invite(run) else place_of(run)
    environment = dict(os.environ)
    if isinstance(place, StoreUrl):
        bundle = _require_joinable(place, certificate)
        environment["ATOLL_RUN"] = place.url
    else:
        url = (
            _known(place, certificate)
            if place is not None
            else _invited(parse_invite(run), certificate)
        )
        bundle = _info(url).settings.run.bundle
        environment |= {"ATOLL_RUN": str(url), **_shown(url)}
    if island is not None:
        environment["ATOLL_ISLAND"] = island
    environment |= _consent(environment["ATOLL_RUN"], bundle, trust_code)
    _become(_spelt_out(command), environment)


def _consent(run: str, bundle: str | None, trusted: str | None) -> dict[str, str]:
    """Return what tells the command whose code may run, after asking who is there.

    Raises:
        Refused: the run's bundle is not the one that is trusted.
    """
    if trusted is not None:
        if trusted != bundle:
            its = f"its bundle is {bundle}" if bundle else "it has no bundle"
            raise Refused(
                f"--trust-code is {trusted}, and the run has other code: {its}. Read "
                "that first."
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

    definition, around = definition_of(run), definitions_from_environment()
    if not definition.bundle.code or around.consent is not None:
        return {}
    may_run = is_trusted(definition.bundle, around) or ask_consent(definition, around)
    return {CONSENT: bundle if may_run else DENIED}


def _require_joinable(place: StoreUrl, certificate: Path | None) -> str | None:
    """Return the bundle of a run that this user can take part in; it is remembered.

    Raises:
        UsageError: there is none, or the store cannot keep one.
        StoreDenied: a permission is missing.
    """
    from atoll.exchange.bucket import BucketReader, ThreadTiming
    from atoll.exchange.bucket.create import reliable, require_able, require_there

    if certificate is not None:
        raise UsageError(
            "--certificate is for a coordinator, and this run is in a store, whose "
            "own credentials are asked for. Leave it out."
        )
    require_there(place.url)
    timing = ThreadTiming()
    try:
        store = reliable(place.url, timing.pause)
        reader = BucketReader.open(store, timing, url=place.url)
        require_able(store, reader.view.settings, url=place.url)
    finally:
        timing.close()
    Names(surroundings_from_environment()).remember(reader.run, place.url)
    return reader.view.settings.run.bundle


def _require_one(certificate: Path | None) -> None:
    named = surroundings_from_environment().certificate
    if certificate is not None and named is not None:
        raise UsageError(
            f"--certificate is {certificate}, and ATOLL_CERTIFICATE is {named}. Give "
            "one of them."
        )


def _shown(url: RunUrl) -> dict[str, str]:
    """Return what makes the command show the same certificate as this one."""
    around = surroundings_for(url)
    if around.certificate is None:
        return {}
    key = around.certificate_key or around.certificate
    return {
        "ATOLL_CERTIFICATE": str(around.certificate.absolute()),
        "ATOLL_CERTIFICATE_KEY": str(key.absolute()),
    }


def _known(url: RunUrl, certificate: Path | None) -> RunUrl:
    if certificate is not None:
        known = _credentials().find(str(url))
        _remember(url, known.pin if known else None, certificate)
    return url


def _invited(invite: Invite, certificate: Path | None) -> RunUrl:
    """Return the URL of an invite's run, whose token is known afterwards.

    A paste that is used again on the same machine finds what it gave before.
    """
    if certificate is not None:
        _remember(invite.url, invite.pin, certificate)
    if not _is_member(invite):
        _redeem(invite)
        _require_run(_info(invite.url), invite)
    Names(surroundings_from_environment()).remember(invite.run, str(invite.url))
    return invite.url


def _remember(url: RunUrl, pin: str | None, certificate: Path) -> None:
    """Show a certificate to this run from now on."""
    calling_context(pin, certificate=certificate)  # or it says what is wrong with it
    _credentials().remember(str(url), pin=pin, tokens={}, certificate=certificate)


def _credentials() -> Credentials:
    return Credentials(surroundings_from_environment().credentials)


def _is_member(invite: Invite) -> bool:
    known = _credentials().find(str(invite.url))
    if known is None or known.pin != invite.pin or not known.tokens:
        return False
    try:
        return _info(invite.url).run == invite.run
    except Refused:
        return False


def _redeem(invite: Invite) -> None:
    around = surroundings_for(invite.url)
    caller = HttpClient(
        invite.address.host,
        invite.address.port,
        timeout_s=SILENCE_S,
        connect_timeout_s=CONNECT_S,
        tls=calling_context(
            invite.pin,
            certificate=around.certificate,
            key=around.certificate_key,
        ),
        pin=invite.pin,
    )
    with Asking(invite.url, caller, shown=around.certificate) as asking:
        wait_until_up(
            caller,
            invite.url,
            certificate=around.certificate,
            clock=SystemClock(),
        )
        said = asking.post("/invites/redeem", {"code": invite.code.reveal()})
    token = check_token(str(said["token"]))
    _credentials().remember(
        str(invite.url), pin=invite.pin, tokens={Role.ISLAND: token}
    )


def _info(url: RunUrl) -> Info:
    """Return the run's description, once its coordinator is up.

    Waits as long as an island does, and says so; Ctrl-C ends it.
    """
    caller, _, info = connect_read_only(
        str(url), paths=surroundings_for(url), clock=SystemClock()
    )
    caller.close()
    return info


def _require_run(info: Info, invite: Invite) -> None:
    if info.run != invite.run:
        raise Refused(
            f"{invite.url} serves run {info.run!r}, and the invitation is for "
            f"{invite.run!r}. Ask for a new one."
        )


def _spelt_out(command: Sequence[str]) -> list[str]:
    first = command[0]
    return [sys.executable, *command] if first.endswith(".py") else list(command)


def _become(command: list[str], environment: dict[str, str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as exc:
        raise UsageError(
            f"{command[0]!r} cannot be run: {exc.strerror}. Write the command after "
            "--, for example: atoll join RUN -- python train.py"
        ) from exc
