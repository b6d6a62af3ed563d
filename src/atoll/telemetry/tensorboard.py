"""Events as curves in TensorBoard; needs the extra `tensorboard`.

Records are written by the thread of the subscription. tensorboardX's own writer has a
queue and a thread besides, and when the disk fails it hangs at exit.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from atoll.errors import UsageError
from atoll.telemetry.events import Event, Value

ROUND_SCALARS = ("seconds", "counted", "late", "refused", "bytes", "tokens")
FLUSH_EVERY_S = 2.0
"""A flush of tensorboardX is an fsync, which competes with those of the journal."""

PAUSE_S = 60.0
"""Pause after a failure, so that a full disk does not get a file per event."""

MAX_TAGS = 10_000
"""Curves of one writer: islands choose names freely, and TensorBoard loads all."""


class Scalar(NamedTuple):
    """A point of a curve."""

    tag: str
    step: int
    value: float
    axis: str = "round"
    """The quantity of `step`: tokens, inner_steps or round."""


class TensorBoardWriter:
    """A sink that writes the curves of a run into a separate file.

    For one thread, that of its subscription. Raises the errors of the disk, which
    the subscription counts; a minute later it begins a new file.

    Args:
        directory: The `--logdir` of `tensorboard`; made when it is needed.

    Raises:
        UsageError: tensorboardX is not installed.
    """

    def __init__(self, directory: Path) -> None:
        self._records_to, self._record_of = _tensorboardx()
        self._directory = directory
        self._records: Any = None
        self.lost = 0
        """Events that could not be written."""

        self._tags: set[str] = set()
        self._failed_unix_s = -math.inf
        self._flushed_unix_s = 0.0

    def __call__(self, event: Event) -> None:
        scalars = [scalar for scalar in scalars_of(event) if self._has_room(scalar.tag)]
        if not scalars:
            return
        if abs(event.at_unix_s - self._failed_unix_s) < PAUSE_S:
            self.lost += 1
            return
        try:
            self._write(event.at_unix_s, scalars)
        except OSError:
            # A torn record hides all later records of its file.
            self.lost += 1
            self._failed_unix_s = event.at_unix_s
            self.close()
            raise

    def close(self) -> None:
        """Close the file; the next event begins a new one."""
        records, self._records = self._records, None
        self._flushed_unix_s = 0.0
        if records is not None:
            with suppress(OSError):  # it repeats the error of a failed write
                records.flush()
            with suppress(OSError):
                records.close()

    def _has_room(self, tag: str) -> bool:
        if len(self._tags) < MAX_TAGS:
            self._tags.add(tag)
        return tag in self._tags

    def _write(self, at_unix_s: float, scalars: list[Scalar]) -> None:
        if self._records is None:
            self._records = self._begun()
        # One record per step: the cost of a record is its checksum, in Python.
        for step, points in groupby(scalars, key=lambda scalar: scalar.step):
            record = self._record_of(wall_time=at_unix_s, step=step)
            for point in points:
                record.summary.value.add(tag=point.tag, simple_value=point.value)
            self._records.write(record.SerializeToString())
        if abs(at_unix_s - self._flushed_unix_s) >= FLUSH_EVERY_S:
            self._records.flush()
            self._flushed_unix_s = at_unix_s

    def _begun(self) -> Any:
        self._directory.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds}.{rest:09d}.atoll"
        records = self._records_to(str(self._directory / name))
        head = self._record_of(wall_time=seconds, file_version="brain.Event:2")
        records.write(head.SerializeToString())
        return records


def _tensorboardx() -> tuple[Any, Any]:
    try:
        from tensorboardX import RecordWriter  # type: ignore[import-untyped] # no stubs
        from tensorboardX.proto import event_pb2  # type: ignore[import-untyped]
    except ImportError as exc:
        raise UsageError(
            f"TensorBoard's files need a package that is not installed ({exc.name}). "
            "Run: pip install 'atoll[tensorboard]'"
        ) from exc
    return RecordWriter, event_pb2.Event


def scalars_of(event: Event) -> Iterator[Scalar]:
    """Yield the points that an event adds to curves; most events add none."""
    if event.name == "loss_reported":
        yield from _of_loss(event.fields)
    elif event.name == "round_committed":
        yield from _of_round(event.fields)


def _of_loss(fields: Mapping[str, Value]) -> Iterator[Scalar]:
    island = tag_part(str(fields["island"]))
    loss, axis = fields.get("loss"), "inner_steps"
    yield from _scalar(f"loss_by_tokens/{island}", fields["tokens"], loss, "tokens")
    yield from _scalar(f"loss_by_inner_steps/{island}", fields[axis], loss, axis)
    metrics = fields.get("metrics")
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        yield from _scalar(f"{tag_part(name)}/{island}", fields[axis], value, axis)


def _of_round(fields: Mapping[str, Value]) -> Iterator[Scalar]:
    for name in ROUND_SCALARS:
        tag = f"round_{name}/fragment-{fields['fragment']}"
        yield from _scalar(tag, fields["round"], fields[name])
    yield from _scalar(
        "stall_share_mean", fields["round"], fields.get("stall_share_mean")
    )


def _scalar(
    tag: str, step: Value, value: Value, axis: str = "round"
) -> Iterator[Scalar]:
    if isinstance(step, int) and step < 2**63 and isinstance(value, int | float):
        yield Scalar(tag, step, float(value), axis)


def tag_part(name: str) -> str:
    """Return a name as part of a tag; different names give different parts.

    >>> tag_part("tokyo-1"), tag_part("東/1")
    ('tokyo-1', '=6771==2f=1')
    """
    return re.sub(r"[^A-Za-z0-9._-]", lambda match: f"={ord(match[0]):x}=", name)
