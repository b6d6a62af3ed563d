"""Owns how the ranks of one island act as one. Does not know how updates travel.

Start reading at `forming.form`, then `leader` and `follower`; `parts` is the work.
"""

from atoll.torch.ranks.joining import join_ranks

__all__ = ["join_ranks"]
