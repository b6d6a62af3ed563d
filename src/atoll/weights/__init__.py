"""Owns a fragment's weights on the host: seal, reduce, apply, adopt, block by block.

Does not know where updates come from, nor which framework trains.
Start reading at `layout`, then `state`.
"""

from atoll.weights.adopt import adopt
from atoll.weights.agree import agree
from atoll.weights.layout import FragmentLayout, Layout, lay_out
from atoll.weights.reduce import Contribution, reduce
from atoll.weights.seal import seal
from atoll.weights.spare import Spare
from atoll.weights.state import FragmentState
from atoll.weights.terms import Terms, terms_of
from atoll.weights.verify import UpdateCheck, require_state, require_update

__all__ = [
    "Contribution",
    "FragmentLayout",
    "FragmentState",
    "Layout",
    "Spare",
    "Terms",
    "UpdateCheck",
    "adopt",
    "agree",
    "lay_out",
    "reduce",
    "require_state",
    "require_update",
    "seal",
    "terms_of",
]
