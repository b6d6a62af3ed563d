"""Islands of several real processes, each forked from one that has loaded torch."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PATIENT_S = 90.0
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "atoll.torch.ranks",
    "tests.torch.rank_loops",
    "tests.torch.rank_faults",
    "tests.torch.rank_rounds",
]

Work = Callable[..., Any]
"""Is given its rank and the group's arguments; returns what the test looks at."""


@dataclass
class Group:
    """The processes of one island: a world of torch.distributed, or one alone."""

    work: Work
    arguments: Sequence[Any] = ()
    ranks: int = 1
    timeout_s: float = 60.0
    """Of the group that the model trains with."""

    environment: dict[str, str] = field(default_factory=dict)


def run_groups(*groups: Group, within_s: float = PATIENT_S) -> list[list[Any]]:
    """Return what each rank of each group returned; an exception is one, too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        started = [
            [
                _start(context, group, rank, Path(folder) / f"world-{number}")
                for rank in range(group.ranks)
            ]
            for number, group in enumerate(groups)
        ]
        try:
            until_s = time.monotonic() + within_s
            return [[_result(*each, until_s) for each in group] for group in started]
        finally:
            for group in started:
                for process, _ in group:
                    process.kill()
                    process.join()


def _start(context: Any, group: Group, rank: int, meeting: Path) -> tuple[Any, Any]:
    mine, theirs = context.Pipe(duplex=False)
    environment = {**os.environ, **group.environment}
    process = context.Process(
        target=_main, args=(theirs, group, rank, meeting, environment)
    )
    process.start()
    theirs.close()
    return process, mine


def _result(process: Any, said: Connection, until_s: float) -> Any:
    if not wait([said], max(0.0, until_s - time.monotonic())):
        raise TimeoutError(f"Process {process.pid} has not ended in time.")
    try:
        is_well, result = said.recv()
    except EOFError:
        process.join()
        return RuntimeError(f"ended with status {process.exitcode}")
    if not is_well:
        raise AssertionError(f"A rank failed:\n{result}")
    return result


def _main(
    said: Connection,
    group: Group,
    rank: int,
    meeting: Path,
    environment: dict[str, str],
) -> None:
    # The fork server has the environment of the test that started it.
    os.environ.clear()
    os.environ.update(environment)
    try:
        _prepare(group, rank, meeting)
        result = group.work(rank, *group.arguments)
    except BaseException:
        said.send((False, traceback.format_exc()))
        raise
    said.send((True, result))
    said.close()


def _prepare(group: Group, rank: int, meeting: Path) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from atoll import kernels

    torch.set_num_threads(1)
    kernels.use("numpy")  # starts at once
    if group.ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=group.ranks,
            timeout=timedelta(seconds=group.timeout_s),
        )
