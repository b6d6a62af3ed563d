"""What the first rank of a world decides for all of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(minutes=30)
"""A person may be asked, and go and read first."""


def decided(decide: Callable[[], bool]) -> bool:
    """Return what the first rank says: it alone decides, and all ranks call this.

    Before torch.distributed is entered, every process decides for itself.

    Raises:
        AtollError: what `decide` raises, the same on every rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return decide()
    from atoll.torch.ranks.faults import from_message, to_message
    from atoll.torch.ranks.line import LEADER, open_lines

    (line,) = open_lines(range(dist.get_world_size()), PATIENCE, 1)
    if not line.is_leader:
        said = line.hear(LEADER)
        if "answer" not in said:
            raise from_message(said)
        return bool(said["answer"])
    try:
        answer = decide()
    except BaseException as exc:  # or the others would wait for ever
        line.tell(to_message(exc, LEADER))
        raise
    line.tell({"answer": answer})
    return answer
