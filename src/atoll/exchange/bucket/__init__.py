"""Owns runs without a coordinator: islands that meet in an object store.

Start reading at `keys`, then `sight` and `exchange`.
"""

from atoll.exchange.bucket.exchange import StoreExchange
from atoll.exchange.bucket.reader import BucketReader
from atoll.exchange.bucket.runtime import ThreadTiming, Timing

__all__ = ["BucketReader", "StoreExchange", "ThreadTiming", "Timing"]
