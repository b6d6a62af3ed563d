"""The entrypoint of a training container: it fetches secrets, and becomes the leader.

    python -m atoll.launch.engines.sagemaker.entrypoint --region R --secret A=NAME \
        --secrets atoll/reef-1 -- =python =-m =atoll.launch.leader ...

Rule 1: SageMaker takes arguments of one line and at most 256 characters. `=` begins an
argument of the command and `+` continues it; characters are escaped as in JSON.
Rule 2: a secret's value comes from Secrets Manager, by the job's role, into the
environment of the leader; the description of the job has only its name.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from atoll.errors import AtollError
from atoll.launch.bootstrap import become

MODULE = "atoll.launch.engines.sagemaker.entrypoint"
MAX_ARGUMENT = 256


def folded(argv: Sequence[str]) -> list[str]:
    """Return an argv as the arguments of a container."""
    room = MAX_ARGUMENT - 1
    arguments = []
    for argument in argv:
        text = json.dumps(argument)[1:-1]
        pieces = [
            text[start : start + room] for start in range(0, len(text), room)
        ] or [""]
        arguments += [f"={pieces[0]}", *(f"+{piece}" for piece in pieces[1:])]
    return arguments


def unfolded(arguments: Sequence[str]) -> list[str]:
    """Return the argv that was folded."""
    argv: list[str] = []
    for argument in arguments:
        if argument.startswith("="):
            argv.append(argument[1:])
        else:
            argv[-1] += argument[1:]
    return [str(json.loads(f'"{text}"')) for text in argv]


def main(arguments: Sequence[str] | None = None) -> None:
    """Become the leader of an island, with its secrets."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--region", required=True)
    parser.add_argument("--endpoint")
    parser.add_argument("--secret", action="append", default=[], metavar="VARIABLE=ID")
    parser.add_argument("--secrets", metavar="ID")
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args(arguments)
    try:
        environment = {**os.environ, **_secrets(options)}
        become(unfolded(options.argv), environment)
    except (AtollError, BotoCoreError, ClientError, ValueError) as exc:
        sys.exit(f"atoll: the island cannot start: {exc}")


def _secrets(options: argparse.Namespace) -> dict[str, str]:
    if not options.secret and options.secrets is None:
        return {}
    keeper = boto3.client(
        "secretsmanager", region_name=options.region, endpoint_url=options.endpoint
    )
    values: dict[str, str] = {}
    if options.secrets is not None:
        document = keeper.get_secret_value(SecretId=options.secrets)["SecretString"]
        values |= json.loads(document)
    for secret in options.secret:
        variable, _, named = secret.partition("=")
        values[variable] = keeper.get_secret_value(SecretId=named)["SecretString"]
    return values


if __name__ == "__main__":
    main()
