"""Owns how the ranks of one island act as one. Does not know how updates travel.

Start reading at `join.form`, then `leader`, `follower` and `dispatcher`;
`sharded_memory` has the work.
"""

from atoll.torch.ranks.join import join_ranks

__all__ = ["join_ranks"]
