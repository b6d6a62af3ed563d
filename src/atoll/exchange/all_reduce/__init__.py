"""Owns the mean of equal vectors in a bucket. Does not know runs, nor what trains.

For whoever needs only that: a fixed number of ranks, all of which must come. A run is
for everybody else. Start reading at `reducing.AllReduce`.
"""

from atoll.exchange.all_reduce.frames import KINDS, Sections
from atoll.exchange.all_reduce.reduction import AllReduce
from atoll.exchange.all_reduce.rendezvous import Rendezvous, open_place
from atoll.store import RequestCounts, Store

__all__ = [
    "KINDS",
    "AllReduce",
    "Rendezvous",
    "RequestCounts",
    "Sections",
    "Store",
    "open_place",
]
