"""A coordinator on a port is an exchange: over real TCP, plain and encrypted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from atoll.settings import RunSettings
from atoll.testing import DEALER_CLAIMS, EXCHANGE_CLAIMS
from atoll.testing.dealer_contract import AttachDealer, OpenDealingRun
from atoll.testing.exchange_contract import Attach, Claim
from tests.coordinator.serving import Islands, serving

Opening = Callable[..., Callable[[RunSettings], Attach]]


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Opening]:
    """Return what opens runs, plain or with TLS, until the test ends."""
    with ExitStack() as stack:
        count = iter(range(100))

        def open_with(*, has_tls: bool) -> Callable[[RunSettings], Attach]:
            def open_run(settings: RunSettings) -> Attach:
                directory = tmp_path / f"run-{next(count)}"
                served = serving(directory, settings, has_tls=has_tls)
                return Islands(stack.enter_context(served), stack)

            return open_run

        yield open_with


@pytest.mark.parametrize("claim", DEALER_CLAIMS, ids=lambda claim: claim.__name__)
def test_a_coordinator_on_a_port_is_a_dealer(
    claim: Callable[[OpenDealingRun], None], tmp_path: Path
) -> None:
    """Rows are dealt over a connection as in one process."""
    with ExitStack() as stack:

        def open_run(settings: RunSettings) -> AttachDealer:
            served = serving(tmp_path / "run", settings)
            return Islands(stack.enter_context(served), stack)

        claim(open_run)


@pytest.mark.parametrize("claim", EXCHANGE_CLAIMS, ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_a_coordinator_on_a_port_is_an_exchange(
    claim: Claim, has_tls: bool, opening: Opening
) -> None:
    """All that islands may rely on holds over a connection."""
    claim(opening(has_tls=has_tls))
