"""torchft's DiLoCo for `round.py`: the process where all meet, or one island.

    _round_torchft.py meeting ISLANDS
    _round_torchft.py island ADDRESS NUMBER ISLANDS ELEMENTS

One fragment, fp32, all-reduce by gloo, outer Nesterov: an island's outer step as its
`optimizer.step()` takes it. The inner optimizer has no gradients and does nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
from _round_crew import attend
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

TENSORS = 50
SYNC_EVERY = 2
"""The first of two inner steps synchronises nothing."""

CPU = torch.device("cpu")
PATIENT = timedelta(seconds=120)


def main() -> None:
    """Be what the first argument says."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    what, *rest = sys.argv[1:]
    roles: dict[str, Callable[..., None]] = {"meeting": meet, "island": take_part}
    roles[what](*rest)


def meet(islands: str) -> None:
    """Tell the islands of each other until the end."""
    place = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=int(islands), join_timeout_ms=60_000
    )
    attend({}, address=place.address())
    place.shutdown()


def take_part(address: str, number: str, islands: str, elements: str) -> None:
    """Make one round when told to."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList(
        torch.randn(int(elements) // TENSORS) for _ in range(TENSORS)
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=int(islands),
        use_async_quorum=False,
        timeout=PATIENT,
        quorum_timeout=PATIENT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"island{number}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(
        model.parameters(), lr=0.7, momentum=0.9, nesterov=True, fused=True
    )

    def train() -> None:
        inner.step()
        with torch.no_grad():
            for parameter in model:
                parameter.mul_(0.999)

    def make_round() -> dict[str, object]:
        step = manager.current_step()
        inner.step()
        return {"counted": manager.current_step() - step}

    with DiLoCo(
        manager, [model], inner, outer, sync_every=SYNC_EVERY, backup_device=CPU
    ):
        attend({"train": train, "round": make_round})
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
