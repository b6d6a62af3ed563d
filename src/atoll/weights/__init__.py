"""Owns a fragment's weights on the host: seal, reduce, apply, adopt, block by block.

Does not know where updates come from, nor which framework trains.
Start reading at `layout`, then `state`.
"""

from atoll.weights.layout import (
    BodyPool,
    FragmentLayout,
    Layout,
    Terms,
    lay_out,
    terms_of,
)
from atoll.weights.local import adopt, seal
from atoll.weights.reduce import Contribution, agree, gather, reduce
from atoll.weights.state import FragmentState
from atoll.weights.verify import UpdateCheck, require_state, require_update

__all__ = [
    "BodyPool",
    "Contribution",
    "FragmentLayout",
    "FragmentState",
    "Layout",
    "Terms",
    "UpdateCheck",
    "adopt",
    "agree",
    "gather",
    "lay_out",
    "reduce",
    "require_state",
    "require_update",
    "seal",
    "terms_of",
]
