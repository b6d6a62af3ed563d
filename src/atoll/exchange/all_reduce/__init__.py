"""Owns the mean of equal vectors in a bucket. Does not know runs, nor what trains.

For whoever needs only that: a fixed number of ranks, all of which must come. A run is
for everybody else. Start reading at `reducing.AllReduce`.
"""

from atoll.exchange.all_reduce.place import Place, open_place
from atoll.exchange.all_reduce.reducing import AllReduce
from atoll.exchange.all_reduce.sections import KINDS, Sections
from atoll.store import Requests, Store

__all__ = [
    "KINDS",
    "AllReduce",
    "Place",
    "Requests",
    "Sections",
    "Store",
    "open_place",
]
