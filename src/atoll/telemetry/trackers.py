"""Experiment trackers of other projects: Weights & Biases, MLflow and trackio.

One process writes a whole run, with the curves of `tensorboard.scalars_of`. Several
writers of one W&B run would overwrite each other's steps; one that sees everything has
no step, and an axis for each curve instead: `run/tokens`, `run/inner_steps` or
`run/round`.

The libraries are imported when a tracker is made. Credentials are theirs: nothing of
Atoll reads or stores one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from typing import Any, Protocol

from atoll.errors import UsageError
from atoll.telemetry.tensorboard import Scalar

MAX_BATCH = 1000
"""Metrics that MLflow accepts in one request."""

MAX_PARAM_CHARS = 500
RUN_TAG = "atoll.run"


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The description of a run that a tracker stores."""

    run_id: str
    name: str
    settings: Mapping[str, Any]
    """By dotted key."""


class Tracker(Protocol):
    """The run of a tracker. `atoll track` is the only caller. Close it."""

    def write(self, points: Sequence[Scalar], *, at_unix_s: float) -> None:
        """Add points of curves, in order. They are stored or queued on return."""

    def close(self) -> None:
        """Send all points, and end the writer. Safe to repeat."""


class WandbTracker:
    """A run of Weights & Biases, resumed by the id of the run.

    Args:
        run: The run.
        target: PROJECT or ENTITY/PROJECT.
    """

    def __init__(self, run: TrackedRun, target: str) -> None:
        wandb = _library("wandb")
        entity, _, project = target.rpartition("/")
        self._run: Any = wandb.init(
            id=run.run_id,
            name=run.name,
            project=project,
            entity=entity or None,
            resume="allow",
            job_type="run",
            config=dict(run.settings),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._tags: set[str] = set()

    def write(self, points: Sequence[Scalar], *, at_unix_s: float) -> None:
        """Log one row for each value of an axis."""
        for axis, step, values in _rows(points):
            for tag in values.keys() - self._tags:
                # A glob would not match a name with a slash.
                self._run.define_metric(tag, step_metric=axis)
                self._tags.add(tag)
            self._run.log({axis: step, **values})

    def close(self) -> None:
        """Finish the run of this process; a later one resumes it."""
        self._run.finish()


class TrackioTracker:
    """A run of trackio, resumed by the id of the run.

    Args:
        run: The run.
        target: PROJECT, or PROJECT@SPACE of Hugging Face.
    """

    def __init__(self, run: TrackedRun, target: str) -> None:
        trackio = _library("trackio")
        project, _, space = target.partition("@")
        self._run: Any = trackio.init(
            project=project,
            name=run.run_id,
            space_id=space or None,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, points: Sequence[Scalar], *, at_unix_s: float) -> None:
        """Log one row for each value of an axis."""
        for axis, step, values in _rows(points):
            self._run.log({axis: step, **values})

    def close(self) -> None:
        """Send the queue, and end its thread."""
        self._run.finish()


class MlflowTracker:
    """A run of MLflow, found again by a tag.

    A step of MLflow is a whole number: the tokens, inner steps or round of the point.

    Args:
        run: The run.
        target: The name of an experiment; the server is MLFLOW_TRACKING_URI's.
    """

    def __init__(self, run: TrackedRun, target: str) -> None:
        mlflow = _library("mlflow")
        self._entities = _library("mlflow.entities")
        self._client: Any = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(target)
        experiment_id = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(target)
        )
        earlier = self._client.search_runs(
            [experiment_id], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1
        )
        if earlier:
            self._run_id = earlier[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        created = self._client.create_run(
            experiment_id, run_name=run.name, tags={RUN_TAG: run.run_id}
        )
        self._run_id = created.info.run_id
        for part in _parts(list(run.settings.items()), 100):
            params = [
                self._entities.Param(key, str(value)[:MAX_PARAM_CHARS])
                for key, value in part
            ]
            self._client.log_batch(self._run_id, params=params)

    def write(self, points: Sequence[Scalar], *, at_unix_s: float) -> None:
        """Log the points in batches."""
        at_ms = round(1000 * at_unix_s)
        for part in _parts(points, MAX_BATCH):
            metrics = [
                # MLflow refuses "=", with which a tag escapes other characters.
                self._entities.Metric(
                    point.tag.replace("=", "."), point.value, at_ms, point.step
                )
                for point in part
            ]
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished; a later process resumes it."""
        self._client.set_terminated(self._run_id)


TRACKERS: Mapping[str, Callable[[TrackedRun, str], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as exc:
        package = name.partition(".")[0]
        raise UsageError(
            f"{package} cannot be imported here: {exc}. Run: pip install {package}"
        ) from exc


def _rows(points: Iterable[Scalar]) -> Iterable[tuple[str, int, dict[str, float]]]:
    """Yield the points of one value of an axis together, in order."""
    for (axis, step), group in groupby(points, lambda point: (point.axis, point.step)):
        yield f"run/{axis}", step, {point.tag: point.value for point in group}


def _parts(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
