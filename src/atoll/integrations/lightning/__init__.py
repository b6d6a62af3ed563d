"""`lightning.Trainer` as one island of a run, by one callback.

Start reading at `callback`, then `parts`: what its checkpoints hold of an island.
"""

from atoll.integrations.lightning.callback import IslandCallback
from atoll.integrations.lightning.parts import newest

__all__ = ["IslandCallback", "newest"]
