"""What a training container starts: it fetches secrets, and becomes the leader.

    python -m atoll.launch.engines.sagemaker.entrypoint --region R --secret A=NAME \
        --secrets atoll/reef-1 -- =python =-m =atoll.launch.job_leader ...

Rule 1: words arrive as SageMaker takes them: on one line, of 256 characters at most.
`=` begins a word and `+` goes on with it; characters are escaped as JSON does.
Rule 2: a secret's value comes from Secrets Manager, by the job's role, into the
environment of the leader; whoever describes the job sees its name alone.
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
MAX_WORD = 256


def folded(words: Sequence[str]) -> list[str]:
    """Return words as the arguments of a container."""
    room = MAX_WORD - 1
    found = []
    for word in words:
        text = json.dumps(word)[1:-1]
        pieces = [text[at : at + room] for at in range(0, len(text), room)] or [""]
        found += [f"={pieces[0]}", *(f"+{piece}" for piece in pieces[1:])]
    return found


def unfolded(arguments: Sequence[str]) -> list[str]:
    """Return the words that were folded."""
    words: list[str] = []
    for each in arguments:
        if each.startswith("="):
            words.append(each[1:])
        else:
            words[-1] += each[1:]
    return [str(json.loads(f'"{word}"')) for word in words]


def main(arguments: Sequence[str] | None = None) -> None:
    """Become the leader of an island, with its secrets."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--region", required=True)
    parser.add_argument("--endpoint")
    parser.add_argument("--secret", action="append", default=[], metavar="VARIABLE=ID")
    parser.add_argument("--secrets", metavar="ID")
    parser.add_argument("words", nargs="+")
    given = parser.parse_args(arguments)
    try:
        environment = {**os.environ, **_secrets(given)}
        become(unfolded(given.words), environment)
    except (AtollError, BotoCoreError, ClientError, ValueError) as exc:
        sys.exit(f"atoll: the island cannot start: {exc}")


def _secrets(given: argparse.Namespace) -> dict[str, str]:
    if not given.secret and given.secrets is None:
        return {}
    keeper = boto3.client(
        "secretsmanager", region_name=given.region, endpoint_url=given.endpoint
    )
    found: dict[str, str] = {}
    if given.secrets is not None:
        said = keeper.get_secret_value(SecretId=given.secrets)["SecretString"]
        found |= json.loads(said)
    for each in given.secret:
        variable, _, named = each.partition("=")
        found[variable] = keeper.get_secret_value(SecretId=named)["SecretString"]
    return found


if __name__ == "__main__":
    main()
