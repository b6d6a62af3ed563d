"""Owns the mean of equal vectors in a bucket. Does not know runs or training.

For programs with a fixed number of ranks, all of which must take part; all others use a
run. Start reading at `reduction.AllReduce`.
"""

from atoll.exchange.all_reduce.frames import KINDS, Sections
from atoll.exchange.all_reduce.reduction import AllReduce
from atoll.exchange.all_reduce.rendezvous import Rendezvous, open_rendezvous
from atoll.store import RequestCounts, Store

__all__ = [
    "KINDS",
    "AllReduce",
    "Rendezvous",
    "RequestCounts",
    "Sections",
    "Store",
    "open_rendezvous",
]
