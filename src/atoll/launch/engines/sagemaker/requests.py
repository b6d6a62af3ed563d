"""What one island is as a training job: the request of `CreateTrainingJob`, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.errors import UsageError
from atoll.launch.base import Order
from atoll.launch.engines.sagemaker.inside import MAX_WORD, MODULE, folded
from atoll.launch.leading import leader_words
from atoll.launch.references import in_engine
from atoll.launch.spec import IslandSpec, Resources

ENGINE = "sagemaker"
DEFAULT_LIMIT_S = 5 * 24 * 3600.0
"""What an account may have without asking; SageMaker's own is one day."""

MAX_VALUE = 512
MAX_WORDS = 100
USUAL = "ml.m5.large"
INSTANCES = {
    ("t4", 1): "ml.g4dn.xlarge",
    ("t4", 4): "ml.g4dn.12xlarge",
    ("a10g", 1): "ml.g5.xlarge",
    ("a10g", 4): "ml.g5.12xlarge",
    ("a10g", 8): "ml.g5.48xlarge",
    ("l4", 1): "ml.g6.xlarge",
    ("l4", 4): "ml.g6.12xlarge",
    ("l4", 8): "ml.g6.48xlarge",
    ("l40s", 1): "ml.g6e.xlarge",
    ("l40s", 4): "ml.g6e.12xlarge",
    ("l40s", 8): "ml.g6e.48xlarge",
    ("a100", 8): "ml.p4d.24xlarge",
    ("h100", 1): "ml.p5.4xlarge",
    ("h100", 8): "ml.p5.48xlarge",
    ("h200", 8): "ml.p5en.48xlarge",
    ("b200", 8): "ml.p6-b200.48xlarge",
}
"""The smallest instance that has so many of a kind."""


@dataclass(frozen=True)
class SageMakerOptions:
    """What `--option` takes."""

    role: str | None = None
    """The ARN of the role that jobs run as."""

    output: str | None = None
    """`s3://BUCKET/PREFIX`: SageMaker asks for it, and islands write nothing there."""

    instance_type: str | None = None
    """Of one island: `ml.g5.xlarge`. Without: by `--accelerator`."""

    volume_gb: int = 50
    """Of an island's disk."""

    spot: bool = False
    """Whether an island may be interrupted, for less money; it comes back."""

    region: str | None = None
    profile: str | None = None
    """Of the user's AWS configuration."""

    endpoint_url: str | None = None
    """Where AWS is; without it, where boto3 knows it to be."""


def job_name(launch: str, index: int) -> str:
    """Return the name of an island's job."""
    return f"{launch}-{index}"


def secrets_name(launch: str) -> str:
    """Return the name of a launch's own secrets in Secrets Manager."""
    return f"atoll/{launch}"


def job_requests(
    order: Order, options: SageMakerOptions, *, region: str
) -> list[dict[str, Any]]:
    """Return the request of every island. No value of a secret is in it.

    Raises:
        UsageError: a training job cannot be what the spec asks for.
    """
    spec = order.spec
    _require_possible(spec)
    if not (options.role and options.output):
        raise UsageError(
            "SageMaker needs a role and a place for a job's output. Give --option "
            "role=ARN and --option output=s3://BUCKET/PREFIX."
        )
    limit_s = spec.resources.time_limit_s or DEFAULT_LIMIT_S
    ends = {"MaxRuntimeInSeconds": max(1, int(limit_s))}
    if options.spot:
        ends["MaxWaitTimeInSeconds"] = ends["MaxRuntimeInSeconds"]
    alike = {
        "RoleArn": options.role,
        "OutputDataConfig": {"S3OutputPath": options.output},
        "ResourceConfig": {
            "InstanceType": instance_type(spec.resources, options),
            "InstanceCount": 1,
            "VolumeSizeInGB": options.volume_gb,
        },
        "StoppingCondition": ends,
        "EnableManagedSpotTraining": options.spot,
        "Environment": dict(spec.environment),
        "Tags": [{"Key": "atoll-launch", "Value": order.id}],
    }
    return [
        {
            "TrainingJobName": job_name(order.id, index),
            "AlgorithmSpecification": {
                "TrainingImage": spec.image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["python", "-m", MODULE],
                "ContainerArguments": _arguments(
                    order, index, options, region=region, limit_s=limit_s
                ),
            },
            **alike,
        }
        for index in order.indexes
    ]


def instance_type(resources: Resources, options: SageMakerOptions) -> str:
    """Return what an island runs on.

    Raises:
        UsageError: none is that, or it has been said in two ways.
    """
    if resources.accelerators == 0:
        return options.instance_type or USUAL
    if options.instance_type is not None:
        raise UsageError(
            f"instance_type={options.instance_type!r} and accelerators="
            f"{resources.accelerators} both say what an island has. Leave one out."
        )
    asked = (resources.accelerator or "", resources.accelerators)
    if asked not in INSTANCES:
        known = ", ".join(f"{num} {kind}" for kind, num in INSTANCES)
        raise UsageError(
            f"No instance is known with accelerator={asked[0]!r}, accelerators="
            f"{asked[1]}. Known are {known}; or say --option instance_type=NAME."
        )
    return INSTANCES[asked]


def _arguments(
    order: Order,
    index: int,
    options: SageMakerOptions,
    *,
    region: str,
    limit_s: float,
) -> list[str]:
    words = ["--region", region]
    words += ["--endpoint", options.endpoint_url] if options.endpoint_url else []
    for variable, named in in_engine(order.spec.secrets).items():
        words += ["--secret", f"{variable}={named}"]
    words += ["--secrets", secrets_name(order.id)] if order.values else []
    words += ["--", *folded(leader_words(order.spec, index, limit_s=limit_s))]
    if len(words) > MAX_WORDS or any(len(each) > MAX_WORD for each in words):
        raise UsageError(
            f"The command of an island is {len(words)} arguments for SageMaker, which "
            f"takes {MAX_WORDS} of {MAX_WORD} characters. Put it into a script."
        )
    return words


def _require_possible(spec: IslandSpec) -> None:
    if spec.image is None:
        raise UsageError(
            "SageMaker runs an island in an image of a registry, and requirements="
            f"{spec.requirements} cannot take its place. Give --image with "
            "atoll[sagemaker] in it: ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG."
        )
    for name in ("cpus", "memory_bytes"):
        if (value := getattr(spec.resources, name)) is not None:
            raise UsageError(
                f"{name}={value:g} cannot be asked of sagemaker, which has instances. "
                "Choose one: --option instance_type=NAME."
            )
    for variable, text in spec.environment.items():
        if len(text) > MAX_VALUE:
            raise UsageError(
                f"{variable} has {len(text)} characters, and SageMaker's environment "
                f"takes {MAX_VALUE}. Put it into a file of the image or of the code."
            )
