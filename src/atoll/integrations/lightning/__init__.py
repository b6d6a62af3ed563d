"""`lightning.Trainer` as one island of a run, by one callback.

Start reading at `callback`, which also has the island's state in checkpoint files.
"""

from atoll.integrations.lightning.callback import IslandCallback, newest

__all__ = ["IslandCallback", "newest"]
