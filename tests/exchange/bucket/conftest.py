"""The real stores of `tests.store`, for runs in them."""

from tests.store.conftest import azure, s3, weak

__all__ = ["azure", "s3", "weak"]
