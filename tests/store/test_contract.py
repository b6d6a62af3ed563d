"""Every store that needs nothing but this machine keeps the contract."""

from __future__ import annotations

import itertools
from pathlib import Path

import obstore
import pytest

from atoll.store import (
    FileStore,
    MemoryStore,
    RetryingStore,
)
from atoll.store.fsspec import FsspecStore
from atoll.store.obstore import ObstoreStore
from atoll.testing.store_contract import (
    STORE_CLAIMS,
    WEAK_STORE_CLAIMS,
    Claim,
    OpenStore,
)

NUMBERS = itertools.count()


def _openers(directory: Path) -> dict[str, OpenStore]:
    def new() -> Path:
        return directory / f"store-{next(NUMBERS)}"

    return {
        "memory": MemoryStore,
        "file": lambda: FileStore(new()),
        "obstore memory": lambda: ObstoreStore(
            obstore.store.MemoryStore(), name="memory"
        ),
        "patient memory": lambda: RetryingStore(MemoryStore()),
    }


@pytest.mark.parametrize("claim", STORE_CLAIMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", sorted(_openers(Path())))
def test_it_is_a_store(kind: str, claim: Claim, tmp_path: Path) -> None:
    """An adapter does what the port says."""
    claim(_openers(tmp_path)[kind])


@pytest.mark.parametrize("claim", WEAK_STORE_CLAIMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_fsspec_is_a_store_without_put_new(
    scheme: str, claim: Claim, tmp_path: Path
) -> None:
    """It looks before it puts, and says that two may do so at once."""
    claim(lambda: FsspecStore(f"{scheme}://{tmp_path}/{next(NUMBERS)}"))
