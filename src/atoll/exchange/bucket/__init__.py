"""Owns runs without a coordinator: islands share an object store.

Does not know HTTP, nor any particular store. Start reading at `keys`, then `view` and
`exchange`.
"""

from atoll.exchange.bucket.exchange import StoreExchange
from atoll.exchange.bucket.reader import BucketReader

__all__ = ["BucketReader", "StoreExchange"]
