"""torchft's own classes over our exchanges: the weights that gloo gives, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import ReduceOp

from atoll import RunEnded, RunSettings
from atoll.errors import ModelError, SettingsError, UsageError
from atoll.exchange import MemoryRun
from atoll.integrations.torchft import Manager, run_settings
from atoll.integrations.torchft.settings import require_settings
from atoll.settings import SyncSection
from tests.integrations.trainings import CASES, STEPS, Training, diloco, train_all
from tests.torch.runs import Weights, bits, together

pytestmark = pytest.mark.torch


def run_of(fragments: int = 1, *, islands: int = 2, **values: object) -> MemoryRun:
    """Return an empty run that so many islands begin."""
    given = {"run.start_islands": islands, **values}
    return MemoryRun(run_settings(fragments).with_values(given))


@pytest.fixture(scope="module")
def over_gloo() -> dict[str, list[str]]:
    """Return what torchft's own manager gives."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.over_gloo"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_gloo(name: str, over_gloo: dict[str, list[str]]) -> None:
    """Two islands end with the bits that torchft's own manager gives them."""
    case = CASES[name]

    ours = train_all(
        run_of(case.fragments), case.wrap, steps=STEPS, fragments=case.fragments
    )

    assert [bits(each).hex() for each in ours] == over_gloo[name]


def test_the_mean_is_of_the_islands() -> None:
    """Each tensor holds the mean of what the islands put in, and futures follow it."""
    run = run_of(islands=2)

    def reduce(name: str, value: float) -> list[float]:
        with Manager(
            run, reduces=[Weights(0.0, 0.0)], replica_id=name, init_sync=False
        ) as manager:
            manager.start_quorum()
            first, second = torch.tensor([value]), torch.tensor([2 * value])
            works = [manager.allreduce(each) for each in (first, second)]
            doubled = works[0].get_future().then(lambda done: done.value() * 2)
            assert all(work.wait() for work in works)
            assert manager.should_commit()
            assert manager.num_participants() == 2
            assert manager.participating_rank() == (0 if name == "a" else 1)
        return [first.item(), second.item(), doubled.wait().item()]

    # 1 and 4: mean 2.5, of the doubles 5.0
    assert (
        together(lambda: reduce("a", 1.0), lambda: reduce("b", 4.0))
        == [[2.5, 5.0, 5.0]] * 2
    )


@pytest.mark.parametrize("wire", ["bf16", "int8", "e3m0"])
def test_quantizing_uses_the_codec_of_the_run(wire: str) -> None:
    """With should_quantize the islands agree to the bit, near what is exact."""
    settings = run_settings(1, wire=wire).with_values({"run.start_islands": 2})
    run = MemoryRun(settings)

    coarse = train_all(run, diloco(4, should_quantize=True), steps=8)
    exact = train_all(run_of(1), diloco(4), steps=8)

    assert bits(coarse[0]) == bits(coarse[1])
    assert bits(coarse[0]) != bits(exact[0])
    torch.testing.assert_close(coarse[0], exact[0], atol=0.2, rtol=0.2)


@pytest.mark.parametrize(
    ("wire", "should_quantize", "said"),
    [
        ("fp32", True, "should_quantize=True, and the run's wire.up"),
        ("int8", False, "should_quantize=False, and the run's wire.up='int8'"),
    ],
)
def test_a_wire_that_was_not_asked_for_is_refused(
    wire: str, should_quantize: bool, said: str
) -> None:
    """Nothing is quantized in silence, and nothing is silently not quantized."""
    run = MemoryRun(run_settings(1, wire=wire))
    with Manager(run, reduces=[Weights(0.0)], init_sync=False) as manager:
        manager.start_quorum()

        with pytest.raises(UsageError, match=said):
            manager.allreduce(torch.zeros(1), should_quantize=should_quantize)


def test_values_that_are_not_finite_stay_at_home() -> None:
    """An island whose training broke takes the others' mean, and spoils nothing."""
    run = run_of(islands=2)

    def reduce(name: str, value: float) -> tuple[float, bool, bool]:
        with Manager(
            run, reduces=[Weights(0.0)], replica_id=name, init_sync=False
        ) as manager:
            manager.start_quorum()
            tensor = torch.tensor([value])
            manager.allreduce(tensor).wait()
            commits = manager.should_commit()
            has_counted = manager.is_participating()
        return tensor.item(), commits, has_counted

    sane, broken = together(lambda: reduce("a", 3.0), lambda: reduce("b", float("nan")))

    assert sane == (3.0, True, True)
    assert broken == (3.0, True, False)


def test_a_round_that_nobody_could_fill_is_not_committed() -> None:
    """Without a finite value nothing is agreed, and the step is tried again."""
    run = run_of(islands=1)
    with Manager(run, reduces=[Weights(0.0)]) as manager:
        manager.start_quorum()
        manager.allreduce(torch.tensor([float("inf")])).wait()
        assert not manager.should_commit()
        assert manager.current_step() == 0

        manager.start_quorum()
        manager.allreduce(torch.tensor([1.0])).wait()
        assert manager.should_commit()
        assert manager.current_step() == 1


def test_an_outcome_that_does_not_come_in_time_is_taken_later() -> None:
    """Its update stands and counts once; the next try takes that round's mean."""
    run = run_of(islands=2)
    model = [Weights(0.0)]
    slow = Manager(run, reduces=model, replica_id="b", init_sync=False)
    with Manager(
        run,
        reduces=model,
        replica_id="a",
        init_sync=False,
        timeout=timedelta(seconds=0.2),
    ) as hasty:
        hasty.start_quorum()
        assert not hasty.allreduce(torch.tensor([1.0])).wait()
        assert not hasty.should_commit()
        assert "in time" in str(hasty.errored())

        slow.start_quorum()
        theirs = torch.tensor([4.0])
        work = slow.allreduce(theirs)
        hasty.start_quorum()
        mine = torch.tensor([100.0])
        assert hasty.allreduce(mine).wait(timedelta(seconds=30))

        assert work.wait()
        assert hasty.should_commit()
        assert slow.should_commit()
        # 1 and 4: mean 2.5; the second try's 100 is nowhere
        assert (mine.item(), theirs.item()) == (2.5, 2.5)
    slow.shutdown()


def test_a_reported_error_keeps_nobody_waiting() -> None:
    """The island's step comes to nothing, and the others go on without it."""
    run = run_of(islands=2)

    def reduce(name: str, fails: bool) -> tuple[float, bool]:
        with Manager(
            run, reduces=[Weights(0.0)], replica_id=name, init_sync=False
        ) as manager:
            manager.start_quorum()
            if fails:
                manager.report_error(ValueError("the loss is NaN"))
            tensor = torch.tensor([5.0])
            manager.allreduce(tensor).wait()
            commits = manager.should_commit()
        return tensor.item(), commits

    assert together(lambda: reduce("a", False), lambda: reduce("b", True)) == [
        (5.0, True),
        (5.0, False),
    ]


def test_the_end_of_the_run_ends_the_block() -> None:
    """After its last round a plain loop simply ends."""
    run, training = run_of(islands=1, **{"run.end_rounds": 2}), Training(0)
    with training.manager(run) as manager, diloco(3)(training, manager):
        for _ in range(100):
            training.step()

    assert training.inner_steps == 9
    assert manager.current_step() == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"outer.optimizer": "nesterov"}, "outer.optimizer='nesterov'"),
        ({"outer.lr": 0.5}, "outer.lr=0.5"),
        ({"sync.overlap_steps": 3}, "sync.overlap_steps=3"),
        ({"sync.num_fragments": 1}, "sync.num_fragments=1"),
        ({"sync.dynamic_local_updates": True}, "sync.dynamic_local_updates=True"),
        ({"data.order": "run"}, "data.order='run'"),
        ({"run.end_tokens": 5}, "run.end_tokens=5"),
        ({"outer.weight": "tokens"}, "outer.weight='tokens'"),
    ],
)
def test_a_setting_without_effect_is_refused(
    values: dict[str, object], said: str
) -> None:
    """A run that asks for what torchft does its own way is refused by name."""
    run = MemoryRun(run_settings(2).with_values(values))
    with (
        Manager(run, reduces=[Weights(0.0), Weights(0.0)]) as manager,
        pytest.raises(SettingsError, match=said),
    ):
        manager.start_quorum()


def test_an_asynchronous_run_is_refused() -> None:
    """Torchft waits for all islands in each round."""
    settings = RunSettings(sync=SyncSection(mode="async"))

    with pytest.raises(SettingsError, match=r"mode='async' .* must be 'sync'"):
        require_settings(settings, num_fragments=1)


def test_other_modules_than_the_runs_are_refused() -> None:
    """The parameter that differs is named, before anything is sent."""
    run = run_of(islands=1)
    founder = Manager(run, reduces=[Weights(0.0)], replica_id="a")
    founder.start_quorum()
    other = Manager(run, reduces=[Weights(0.0, 0.0)], replica_id="b")

    with pytest.raises(
        ModelError, match=r"'fragments\.0\.w' is a parameter of shape 1"
    ):
        other.start_quorum()
    founder.shutdown()


def test_misuse_is_told() -> None:
    """Every call that cannot be right says what would be."""
    run = run_of(islands=1)
    with pytest.raises(UsageError, match="must be modules with parameters"):
        Manager(run, reduces=[])
    with Manager(run, reduces=[Weights(0.0, 0.0)]) as manager:
        with pytest.raises(UsageError, match=r"Call start_quorum\(\) first"):
            manager.allreduce(torch.zeros(1))
        with pytest.raises(UsageError, match="shrink_only=True"):
            manager.start_quorum(shrink_only=True)
        manager.start_quorum()
        with pytest.raises(UsageError, match="a run agrees on means"):
            manager.allreduce(torch.zeros(1), reduce_op=ReduceOp.MAX)
        with pytest.raises(UsageError, match=r"torch.int64 has no mean"):
            manager.allreduce(torch.zeros(1, dtype=torch.int64))
        with pytest.raises(UsageError, match="reduces 3 elements or more"):
            manager.allreduce(torch.zeros(3))
        work = manager.allreduce(torch.zeros(1))
        with pytest.raises(UsageError, match="reduced 1 of the 2 elements"):
            work.wait()
        manager.register_state_dict_fn("a", print, dict)
        with pytest.raises(UsageError, match="registered as 'a' already"):
            manager.register_state_dict_fn("a", print, dict)


def test_a_run_that_has_ended_says_so() -> None:
    """Outside a block the end is an exception, as it is for every island."""
    run = run_of(islands=1, **{"run.end_rounds": 1})
    manager = Manager(run, reduces=[Weights(0.0)])
    for is_over in (False, True):
        manager.start_quorum()
        manager.allreduce(torch.zeros(1)).wait()
        if is_over:
            with pytest.raises(RunEnded, match="the run ended with round 1"):
                manager.should_commit()
        else:
            assert manager.should_commit()
    manager.shutdown()
