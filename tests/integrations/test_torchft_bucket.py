"""torchft's own classes over a bucket: no coordinator, and the same weights."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.exchange.bucket.create import init
from atoll.integrations.torchft import Manager, run_settings
from atoll.settings import RunSettings
from tests.integrations.trainings import CASES, STEPS, Training, diloco, train_all
from tests.torch.runs import Weights, bits, together

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty store, and a user's own configuration beside it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    return str(tmp_path / "bucket")


def settings_of(fragments: int, islands: int) -> RunSettings:
    """Return a run that so many islands begin."""
    return run_settings(fragments).with_values({"run.start_islands": islands})


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_a_run_in_memory(name: str, bucket: str) -> None:
    """Islands that meet in a bucket end with the bits of any other exchange.

    Those of a run in memory are those of gloo: another test says so.
    """
    case = CASES[name]
    settings = settings_of(case.fragments, 2)
    init(bucket, settings)

    ours = train_all(bucket, case.wrap, steps=STEPS, fragments=case.fragments)
    memory = train_all(
        MemoryRun(settings), case.wrap, steps=STEPS, fragments=case.fragments
    )

    assert [bits(each) for each in ours] == [bits(each) for each in memory]


def test_a_late_island_takes_the_state_of_another(bucket: str) -> None:
    """It is given through the bucket, and both stay equal to the bit."""
    init(bucket, settings_of(1, 1))
    first, late, began = Training(0), Training(1, seed=9), threading.Event()

    def live(training: Training, *, waits: bool) -> None:
        assert not waits or began.wait(60)
        together = step = 0
        with training.manager(bucket) as manager, diloco(3)(training, manager):
            while together < 2:
                training.step()
                if manager.current_step() > step:
                    step = manager.current_step()
                    together += manager.num_participants() == 2
                if step == 2:
                    began.set()

    together(lambda: live(first, waits=False), lambda: live(late, waits=True))

    assert bits(first.agreed()) == bits(late.agreed())


def test_a_bucket_without_a_run_is_refused(bucket: str) -> None:
    """An island does not make up a run where nobody has made one."""
    with pytest.raises(UsageError, match="atoll init"):
        Manager(bucket, reduces=[Weights(0.0)])
