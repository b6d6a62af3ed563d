"""The same training with torchft's own manager, over gloo: what ours must equal.

    python -m tests.integrations.over_gloo

A process of its own, because torchft leaves threads and sockets behind; it prints, as
JSON, the weights that each of `trainings.CASES` ends with.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # it is there
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-untyped] # no stubs
from torchft.coordination import (  # type: ignore[import-untyped] # no stubs
    LighthouseServer,
)

from tests.integrations.trainings import CASES, STEPS, Case, Training, Wrap
from tests.torch.runs import together

PATIENT = timedelta(seconds=60)


@contextmanager
def lighthouse(islands: int) -> Iterator[str]:
    """Run what torchft's managers meet at, and return its address."""
    meeting = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=islands, join_timeout_ms=60_000
    )
    try:
        yield f"http://127.0.0.1:{meeting.address().rpartition(':')[2]}"
    finally:
        meeting.shutdown()


def main() -> None:
    """Train every case, and print what the islands end with."""
    logging.disable(logging.WARNING)
    print(json.dumps({name: train_all(case) for name, case in CASES.items()}))  # noqa: T201 - to who started it


def train_all(case: Case) -> list[str]:
    """Train two islands as threads, and return the bytes that each ends with."""
    trainings = [Training(number, fragments=case.fragments) for number in (0, 1)]
    with lighthouse(len(trainings)) as address:
        ended = together(
            *(
                partial(_train_island, address, len(trainings), each, case.wrap)
                for each in trainings
            )
        )
    return [weights.numpy().tobytes().hex() for weights in ended]


def _train_island(
    address: str, islands: int, training: Training, wrap: Wrap
) -> torch.Tensor:
    with ExitStack() as stack:
        manager = _manager(address, islands, training, stack)
        with wrap(training, manager):
            for _ in range(STEPS):
                training.step()
    return training.weights()


def _manager(address: str, islands: int, training: Training, stack: ExitStack) -> Any:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=PATIENT)
    stack.callback(group.shutdown)
    manager = Manager(
        pg=group,
        load_state_dict=training.load,
        state_dict=training.save,
        min_replica_size=islands,
        use_async_quorum=False,
        timeout=PATIENT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=training.name,
        hostname="127.0.0.1",
        init_sync=False,
    )
    stack.callback(lambda store: manager.shutdown(wait=False), store)  # keeps the store
    return manager


if __name__ == "__main__":
    main()
