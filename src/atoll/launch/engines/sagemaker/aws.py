"""AWS as this engine needs it: sessions, calls, and their errors as ours."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    ParamValidationError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.engines.sagemaker.requests import SageMakerOptions

ABSENT = ("ResourceNotFound", "ResourceNotFoundException", "ValidationException")
"""What is not there, or is not in a state for what is asked. SageMaker says the last
of a job that it does not know, and of one that cannot be stopped since it is over."""

_MAY_NOT = (
    "AccessDenied",
    "AccessDeniedException",
    "ExpiredTokenException",
    "InvalidSignatureException",
    "MissingAuthenticationTokenException",
    "UnrecognizedClientException",
)
_AGAIN = (
    "InternalFailure",
    "RequestTimeout",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
)
_NO_LOGIN = (
    CredentialRetrievalError,
    SSOError,
    TokenRetrievalError,
)
"""The user's credentials are to be fetched first, and were not to be had."""


class Aws:
    """The three services that a launch needs, for one user in one region."""

    def __init__(self, options: SageMakerOptions) -> None:
        with told("read your credentials"):
            try:
                session = boto3.Session(
                    profile_name=options.profile, region_name=options.region
                )
                credentials = session.get_credentials()
            except ProfileNotFound as exc:
                raise UsageError(f"{exc}. Run `aws configure`.") from exc
        if credentials is None:
            raise UsageError(
                "There are no credentials for AWS here. Run `aws configure`, or set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or --option profile=NAME."
            )
        if session.region_name is None:
            raise UsageError("No region of AWS is set. Give --option region=NAME.")
        self.region: str = session.region_name
        known = {
            "endpoint_url": options.endpoint_url,
            "config": Config(retries={"mode": "standard", "total_max_attempts": 3}),
        }
        self.jobs: Any = session.client("sagemaker", **known)
        self.secrets: Any = session.client("secretsmanager", **known)
        self.logs: Any = session.client("logs", **known)


@contextmanager
def told(what: str, *, is_fine: Collection[str] = ()) -> Iterator[None]:
    """Let errors of the SDK become ours, but for codes that are no error here."""
    try:
        yield
    except ClientError as exc:
        code, said = exc.response["Error"]["Code"], exc.response["Error"]["Message"]
        status = exc.response["ResponseMetadata"]["HTTPStatusCode"]
        if code in is_fine:
            return
        if code in _MAY_NOT:
            raise Refused(
                f"AWS does not let you {what} ({code}): {said}. Somebody must give "
                "your user, or the role of the jobs, that permission."
            ) from exc
        if status < 500 and code not in _AGAIN:
            raise UsageError(f"AWS cannot {what} ({code}): {said}.") from exc
        raise Unreachable(f"AWS could not {what} ({code}): {said}.") from exc
    except (ParamValidationError, NoCredentialsError) as exc:
        raise UsageError(f"AWS cannot be asked to {what}: {exc}.") from exc
    except _NO_LOGIN as exc:
        raise Refused(
            f"AWS does not know you, to {what}: {exc} Log in again: `aws sso login`, "
            "or `aws configure`."
        ) from exc
    except BotoCoreError as exc:
        raise Unreachable(f"AWS did not answer to {what}: {exc}.") from exc
