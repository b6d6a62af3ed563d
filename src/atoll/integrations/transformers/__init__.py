"""`transformers.Trainer` as one island of a run, by one callback.

Start reading at `callback`, then `parts`: what its checkpoints hold of an island.
"""

from atoll.integrations.transformers.callback import IslandCallback
from atoll.integrations.transformers.parts import newest

__all__ = ["IslandCallback", "newest"]
