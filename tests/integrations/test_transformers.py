"""The real `transformers.Trainer`, as an island of a run in memory."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import atoll.checkpoint
from atoll.errors import AtollWarning, UsageError
from atoll.exchange import MemoryRun
from atoll.integrations.transformers import IslandCallback, newest
from tests.integrations.tiny import (
    CONTEXT,
    Probe,
    anchor_bytes,
    numbers,
    rows,
    tiny_model,
    weights,
)
from tests.torch.runs import bits, run_of

pytestmark = pytest.mark.torch


def run_to(rounds: int) -> MemoryRun:
    """Return a run whose anchor is never what an island has trained."""
    outer = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.5}
    table = {"end_rounds": rounds, "max_islands": 2}
    return run_of(1, every=4, run=table, outer=outer)


def train(
    folder: Path,
    run: Any,
    *,
    probes: list[Probe] | None = None,
    resume: str | None = None,
    island: str = "a",
    model: torch.nn.Module | None = None,
    **arguments: Any,
) -> tuple[Trainer, IslandCallback]:
    """Train a tiny model until the run or the trainer ends."""
    callback = IslandCallback(run, island=island)
    given: dict[str, Any] = {
        "max_steps": 1000,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    trainer = Trainer(
        model or tiny_model(),
        TrainingArguments(str(folder), **given),
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=probes,
    )
    callback.attach(trainer)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        callback.leave()  # as the end of a process does
    return trainer, callback


def test_a_callback_that_is_not_attached_is_refused(tmp_path: Path) -> None:
    """The callback needs its trainer; the error names the call that was forgotten."""
    callback = IslandCallback(run_to(2))
    arguments = TrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(
        tiny_model(), arguments, train_dataset=rows(), callbacks=[callback]
    )
    with pytest.raises(UsageError, match=r"Call callback\.attach\(trainer\) before"):
        trainer.train()
    callback.attach(Trainer(tiny_model(), arguments, train_dataset=rows()))
    with pytest.raises(UsageError, match="not attached to the trainer that trains"):
        trainer.train()

    assert callback.island is None


def test_attaching_twice_adds_one_callback(tmp_path: Path) -> None:
    """A second call changes nothing: the trainer calls the callback once."""
    callback = IslandCallback(run_to(2))
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = Trainer(tiny_model(), arguments, train_dataset=rows())
    callback.attach(trainer)
    callback.attach(trainer)

    assert trainer.callback_handler.callbacks.count(callback) == 1


class Broken(Exception):
    """What a machine that dies does to a training."""


def breaks_at(step: int) -> Probe:
    def check(state: Any, control: Any, model: Any) -> None:
        if state.global_step == step:
            raise Broken

    return Probe(on_step_begin=check)


def test_a_trainer_ends_with_its_run(tmp_path: Path) -> None:
    """It makes the run's inner steps, reports them, and ends with the anchor."""
    trainer, callback = train(tmp_path, run_to(3))
    island = callback.island

    assert island is not None
    assert island.ended
    # 3 rounds of 4 inner steps; a step trains on 2 rows of 8 words.
    assert trainer.state.global_step == island.inner_steps == 12
    assert island.run_tokens == 12 * 2 * CONTEXT
    assert weights(trainer.model) == anchor_bytes(island)
    logged = [each for each in trainer.state.log_history if "loss" in each]
    assert [each["atoll/round"] for each in logged] == [1, 2, 3]
    assert logged[-1]["atoll/inner_steps"] == 12


def test_an_inner_step_is_an_optimizer_step(tmp_path: Path) -> None:
    """Accumulated batches are one inner step, with all their tokens and their mean."""
    trainer, callback = train(
        tmp_path, run_to(2), gradient_accumulation_steps=3, logging_steps=1
    )
    island = callback.island

    assert island is not None
    assert trainer.state.global_step == island.inner_steps == 8
    assert island.run_tokens == 8 * 3 * 2 * CONTEXT
    for each in trainer.state.log_history[:8]:
        assert each["atoll/loss"] == pytest.approx(each["loss"], rel=1e-3)


def test_the_anchor_is_evaluated_and_local_weights_come_back(tmp_path: Path) -> None:
    """Whoever looks at an evaluation sees the run's weights; training goes on."""
    seen: list[dict[str, bytes]] = []
    trained: dict[str, dict[str, bytes]] = {}
    probe = Probe(
        on_evaluate=lambda state, control, model: seen.append(weights(model)),
        on_step_begin=lambda state, control, model: trained.setdefault(
            "after" if seen else "before", weights(model)
        ),
        on_step_end=lambda state, control, model: (
            trained.update(last=weights(model)) if not seen else None
        ),
    )
    callback = IslandCallback(run_to(2))
    anchors: list[dict[str, bytes]] = []
    looks = Probe(
        on_evaluate=lambda *given: anchors.append(anchor_bytes(callback.island))
    )
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=1000,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        tiny_model(),
        arguments,
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=[probe, looks],
    )
    callback.attach(trainer)
    trainer.train()

    assert seen == anchors
    assert trained["last"] != seen[0]
    assert trained["after"] == trained["last"]


def test_a_checkpoint_holds_the_anchor_and_the_island(tmp_path: Path) -> None:
    """Its weights are the run's; what one island had learnt is a part beside them."""
    anchors: list[dict[str, bytes]] = []
    callback: list[IslandCallback] = []

    def look(state: Any, control: Any, model: Any) -> None:
        island = callback[0].island
        anchors.append(anchor_bytes(island))

    run = run_to(5)
    callback.append(first := IslandCallback(run, island="a"))
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=6,
        save_steps=6,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    probe = Probe(on_save=look)
    model = tiny_model()
    trainer = Trainer(model, arguments, train_dataset=rows(), callbacks=[probe])
    first.attach(trainer)
    trainer.train()

    saved = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert {name: bits(value) for name, value in saved.items()} == anchors[0]
    found = atoll.checkpoint.newest(tmp_path / "checkpoint-6" / "island")
    assert found is not None
    assert found.components == ("island",)
    assert found.weights == "external"
    assert newest(tmp_path) == str(tmp_path / "checkpoint-6")


def test_a_broken_training_goes_on_with_what_it_had_learnt(tmp_path: Path) -> None:
    """The next life has the weights of its checkpoint, made of anchor and island."""
    run = run_to(3)
    at_save: dict[int, dict[str, bytes]] = {}
    begun: list[dict[str, bytes]] = []
    keep = Probe(
        on_step_end=lambda state, control, model: at_save.setdefault(
            state.global_step, weights(model)
        )
    )
    with pytest.raises(Broken):
        train(
            tmp_path,
            run,
            probes=[keep, breaks_at(6)],
            save_strategy="steps",
            save_steps=6,
        )
    looks = Probe(on_train_begin=lambda s, c, model: begun.append(weights(model)))
    trainer, callback = train(tmp_path, run, probes=[looks], resume=newest(tmp_path))

    # Anchor plus difference, which fp32 has rounded.
    for name, value in at_save[6].items():
        torch.testing.assert_close(numbers(begun[0][name]), numbers(value))
    assert callback.island is not None
    # Beyond step 6, with one round committed, two more windows of 4 inner steps.
    assert trainer.state.global_step == callback.island.inner_steps == 14
    assert callback.island.round == 3


def test_a_checkpoint_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    """A trainer that is killed while it saves goes on from the checkpoint before."""
    train(tmp_path, run_to(2), save_strategy="steps", save_steps=3)
    for cut in ("optimizer.pt", "trainer_state.json", "island"):
        last = tmp_path / "checkpoint-8"
        shutil.copytree(last, tmp_path / "whole")
        if (last / cut).is_dir():
            shutil.rmtree(last / cut)
        else:
            os.truncate(last / cut, 100)

        with pytest.warns(AtollWarning, match="cut short .*: checkpoint-8"):
            assert newest(tmp_path) == str(tmp_path / "checkpoint-6")
        shutil.rmtree(last)
        (tmp_path / "whole").rename(last)
    assert newest(tmp_path) == str(tmp_path / "checkpoint-8")


def test_an_evaluation_leaves_the_checkpoint_of_its_step_whole(tmp_path: Path) -> None:
    """What was saved after a step is still an island's when its epoch is evaluated."""
    train(
        tmp_path,
        run_to(5),
        per_device_train_batch_size=8,  # 64 rows: an epoch of 8 steps
        max_steps=8,
        save_strategy="steps",
        save_steps=8,
        eval_strategy="epoch",
    )
    assert newest(tmp_path) == str(tmp_path / "checkpoint-8")


def test_the_part_of_another_save_is_not_taken(tmp_path: Path) -> None:
    """An island that was put into another checkpoint's directory is not of it."""
    run = run_to(3)
    train(tmp_path, run, save_strategy="steps", save_steps=3, max_steps=6)
    last = tmp_path / "checkpoint-6"
    shutil.rmtree(last / "island")
    shutil.copytree(tmp_path / "checkpoint-3" / "island", last / "island")

    with pytest.warns(AtollWarning, match="cut short"):
        assert newest(tmp_path) == str(tmp_path / "checkpoint-3")
    with pytest.warns(AtollWarning, match="no island was saved with its checkpoint"):
        train(tmp_path, run, resume=str(last), max_steps=7)


def test_who_goes_back_by_hand_goes_on_from_there(tmp_path: Path) -> None:
    """The newest checkpoint is the last one saved; what has counted counts once."""
    run = run_to(5)
    train(tmp_path, run, save_strategy="steps", save_steps=3, max_steps=9)
    begun: list[bool] = []
    callback = IslandCallback(run, island="a")
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=5,
        save_steps=5,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    looks = Probe(
        on_train_begin=lambda s, c, model: begun.append(
            weights(model) == anchor_bytes(callback.island)
        )
    )
    trainer = Trainer(tiny_model(), arguments, train_dataset=rows(), callbacks=[looks])
    callback.attach(trainer)
    with pytest.warns(AtollWarning, match="trains rows again"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    assert begun == [True]
    assert newest(tmp_path) == str(tmp_path / "checkpoint-5")


def test_another_island_does_not_take_this_one_s_work(tmp_path: Path) -> None:
    """A copied directory gives moments, and no work that is somebody else's."""
    run = run_to(5)
    train(tmp_path / "a", run, save_strategy="steps", save_steps=6, max_steps=6)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    begun: list[int] = []
    looks = Probe(on_train_begin=lambda state, c, m: begun.append(state.global_step))

    with pytest.warns(AtollWarning, match="of island 'a', and this is 'b'"):
        _, callback = train(
            tmp_path / "b",
            run,
            island="b",
            probes=[looks],
            resume=newest(tmp_path / "b"),
            max_steps=8,
        )

    assert begun == [6]
    assert callback.island is not None
    assert callback.island.inner_steps == 2


@pytest.mark.filterwarnings("error")
def test_sigterm_saves_whatever_the_strategy(tmp_path: Path) -> None:
    """It saves at once, does not evaluate first, and leaves the run."""
    run = run_to(5)

    def terminate(state: Any, control: Any, model: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer, callback = train(
        tmp_path,
        run,
        probes=[Probe(on_step_begin=terminate)],
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="best",
        metric_for_best_model="loss",
    )

    assert trainer.state.global_step == 3
    assert newest(tmp_path) == str(tmp_path / "checkpoint-3")
    assert not any("eval_loss" in each for each in trainer.state.log_history)
    assert callback.island is not None
    assert not callback.island.ended
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_that_has_ended_gets_no_step(tmp_path: Path) -> None:
    """A trainer that is started again holds the run's weights, and trains nothing."""
    run = run_to(2)
    first, _ = train(tmp_path / "first", run)
    again, callback = train(tmp_path / "again", run, island="b", model=tiny_model(1))

    assert again.state.global_step == 0
    assert callback.island is not None
    assert callback.island.inner_steps == 0
    assert weights(again.model) == weights(first.model)
    assert not again.optimizer.state
    assert again.state.log_history[-1]["train_loss"] == 0.0


def test_the_best_model_may_be_loaded_at_the_end(tmp_path: Path) -> None:
    """The island has left before the trainer puts other weights into the model."""
    trainer, callback = train(
        tmp_path,
        run_to(5),
        max_steps=6,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        learning_rate=1.0,
    )
    best = trainer.state.best_model_checkpoint
    assert best is not None
    saved = load_file(Path(best) / "model.safetensors")

    assert weights(trainer.model) == {name: bits(v) for name, v in saved.items()}
    assert callback.island is not None
    assert callback.island.metrics()["atoll/updates_refused"] == 0
