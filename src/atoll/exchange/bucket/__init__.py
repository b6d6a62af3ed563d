"""Owns runs without a coordinator: islands that meet in an object store.

Start reading at `keys`, then `sight` and `exchange`.
"""

from atoll.exchange.bucket.exchange import StoreExchange
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.bucket.timing import ThreadTiming, Timing

__all__ = ["Lookout", "StoreExchange", "ThreadTiming", "Timing"]
