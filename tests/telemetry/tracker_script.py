"""Writes curves with the real packages, in their local modes, and reads them back.

    python tests/telemetry/tracker_script.py wandb DIRECTORY first
    python tests/telemetry/tracker_script.py wandb DIRECTORY second
    python tests/telemetry/tracker_script.py wandb DIRECTORY read

`test_trackers.py` runs it in the environment that `make engines` has made.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from atoll.telemetry.tensorboard import Scalar
from atoll.telemetry.trackers import TRACKERS, TrackedRun

BLOCK = 32_768
RUN = TrackedRun(
    run_id="lagoon-5d0c1f6d2a31",
    name="lagoon",
    settings={"sync.sync_every": "100", "wire.up": "e3m0"},
)
FIRST = [
    Scalar("loss_by_tokens/tokyo-1", 1000, 2.5, "tokens"),
    Scalar("round_counted/fragment-0", 1, 3.0, "round"),
]
SECOND = [
    Scalar("loss_by_tokens/tokyo-1", 2000, 2.25, "tokens"),
    Scalar("lr/=6771=", 20, 0.5, "inner_steps"),
]
"""Of the second process."""


def wandb_points(directory: Path) -> list[list[Any]]:
    """Return the points in the files of offline runs."""
    record_type = import_module("wandb.proto.wandb_internal_pb2").Record

    points = []
    files = sorted(directory.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    for file in files:
        for data in leveldb_records(file.read_bytes()):
            record = record_type.FromString(data)
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            axis = next((key for key in items if key.startswith("run/")), None)
            for key, value in items.items():
                if axis and key != axis and not key.startswith("_"):
                    points.append([key, axis, items[axis], value])
    return points


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log: blocks of 32 KiB, with heads of 7 bytes."""
    offset, parts = 7, []  # of the file
    while offset + 7 <= len(data):
        if -offset % BLOCK < 7 and offset % BLOCK:
            offset += -offset % BLOCK
            continue
        size, kind = struct.unpack("<HB", data[offset + 4 : offset + 7])
        offset += 7
        parts.append(data[offset : offset + size])
        offset += size
        if kind in (1, 4):  # a whole record, or its last part
            yield b"".join(parts)
            parts = []


def mlflow_points(directory: Path) -> list[list[Any]]:
    """Return the points of the only run of the experiment."""
    client = import_module("mlflow").MlflowClient()
    experiment = client.get_experiment_by_name("reef")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == RUN.settings
    return [
        [key, "", point.step, point.value]
        for key in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, key)
    ]


def trackio_points(directory: Path) -> list[list[Any]]:
    """Return the points in trackio's database."""
    storage = import_module("trackio.sqlite_storage").SQLiteStorage

    points = []
    for row in storage.get_logs("reef", RUN.run_id):
        axis = next(key for key in row if key.startswith("run/"))
        for key, value in row.items():
            if "/" in key and key != axis:
                points.append([key, axis, row[axis], value])
    return points


def main() -> None:
    """Write a part in this process, or read all points."""
    kind, directory, part = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    os.chdir(directory)
    if part == "read":
        readers = {
            "wandb": wandb_points,
            "mlflow": mlflow_points,
            "trackio": trackio_points,
        }
        (directory / "points.json").write_text(json.dumps(readers[kind](directory)))
        return
    # W&B names the directory of an offline run by the second of its start.
    os.environ["WANDB_DIR"] = part
    Path(part).mkdir()
    tracker = TRACKERS[kind](RUN, "reef")
    points = FIRST if part == "first" else SECOND
    tracker.write(points, at_unix_s=1_700_000_000.0)
    tracker.close()


if __name__ == "__main__":
    main()
