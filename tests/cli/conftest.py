"""The real stores of `tests.store`, for commands on them."""

from tests.store.conftest import s3, weak

__all__ = ["s3", "weak"]
