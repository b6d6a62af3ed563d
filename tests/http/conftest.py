"""One certificate for all tests of this folder: making one takes a while."""

from __future__ import annotations

import pytest

from tests.http.certificates import Certificate, make


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("certificate"))
