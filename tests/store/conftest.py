"""Real stores, one of each for all tests of this folder; every test has its prefix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store.buckets import Settings, azurite, rclone, seaweedfs


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A bucket of SeaweedFS."""
    with seaweedfs(tmp_path_factory.mktemp("s3") / "home") as where:
        yield where


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A container of Azurite."""
    with azurite(tmp_path_factory.mktemp("azure") / "home") as where:
        yield where


@pytest.fixture(scope="session")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A bucket of rclone, which puts over what is there."""
    with rclone(tmp_path_factory.mktemp("weak") / "home") as where:
        yield where
