"""Saving behind the back of a training, keeping some, and touching nothing else."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

import atoll.checkpoint
from atoll.checkpoint import Saver
from atoll.checkpoint.saver import Arena, encode_components
from atoll.errors import AtollError, UsageError
from tests.checkpoint.objects import Weights, newest_value, save_value


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != "lock")


def test_a_save_holds_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    """Training continues immediately; its later changes are not in the checkpoint."""
    model = Weights(1.0, size=2**18)
    with Saver(tmp_path, {"model": model}) as saver:
        assert saver.save()
        model.array += 1.0
        saver.wait()

        assert newest_value(tmp_path) == 1.0

        assert saver.save()
        model.array += 1.0

    assert newest_value(tmp_path) == 2.0


def test_late_components_are_taken_when_they_are_ready(tmp_path: Path) -> None:
    """A scheduler that steps after the optimizer is saved as it is after that."""
    model, scheduler = Weights(1.0), Weights(1.0)
    with Saver(tmp_path, {"model": model, "scheduler": scheduler}) as saver:
        saver.save(late=["scheduler"])
        model.array += 1.0
        scheduler.array += 1.0
        assert newest_value(tmp_path) is None
        saver.finish()
        scheduler.array += 1.0

    again = {"model": Weights(), "scheduler": Weights()}
    atoll.checkpoint.load(tmp_path, again)
    assert [each.value for each in again.values()] == [1.0, 2.0]


def test_no_step_waits_for_a_disk(tmp_path: Path) -> None:
    """While a checkpoint is being written, `save` returns False without waiting."""
    model = Weights(1.0, size=2**22)
    with Saver(tmp_path, {"model": model}) as saver:
        assert saver.save()
        answers = [saver.save() for _ in range(3)]
        saver.wait()
        assert saver.save()

    assert False in answers  # 16 MB are not durable in the time of three calls
    assert newest_value(tmp_path) == 1.0


def test_the_memory_of_a_copy_is_used_again(tmp_path: Path) -> None:
    """The second snapshot is where the first one was."""
    arena = Arena()
    objects = {"model": Weights(3.0)}
    places = []
    for _ in range(2):
        [draft] = arena.copy(encode_components(["model"], objects, is_leader=True))
        places.append(draft.arrays["array"].flat().__array_interface__["data"][0])

    assert places[0] == places[1]


def test_what_a_save_failed_with_is_raised_by_the_next_call(tmp_path: Path) -> None:
    """A disk that failed in the background is not forgotten, and told once."""
    root = tmp_path / "run"
    with Saver(root, {"model": Weights(1.0)}) as saver:
        saver.save(late=["rng"])
        [unfinished] = [path for path in root.iterdir() if path.name.endswith("~")]
        os.rename(unfinished, tmp_path / "stolen")
        saver.finish()
        with pytest.raises(AtollError, match=r"checkpoint-00000001~.* does not exist"):
            saver.wait()

        assert saver.save()

    assert newest_value(root) == 1.0


def test_a_failed_save_is_raised_at_the_end_at_the_latest(tmp_path: Path) -> None:
    """Leaving the block raises the error of a checkpoint that was not saved."""
    root = tmp_path / "run"
    saver = Saver(root, {"model": Weights(1.0)})
    saver.save(late=["rng"])
    [unfinished] = [path for path in root.iterdir() if path.name.endswith("~")]
    os.rename(unfinished, tmp_path / "stolen")

    with pytest.raises(AtollError, match="does not exist"):
        saver.close()


def test_a_state_that_cannot_be_saved_leaves_nothing_behind(tmp_path: Path) -> None:
    """The error names the value, and the last checkpoint stays the newest."""
    save_value(tmp_path, 1.0)
    objects = {"model": Weights(2.0), "trainer": {"callback": print}}

    with pytest.raises(UsageError, match=r"^trainer\.callback is of the type"):
        atoll.checkpoint.save(tmp_path, objects)

    assert newest_value(tmp_path) == 1.0
    assert _names(tmp_path) == ["checkpoint-00000001"]


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    """Of ten checkpoints the last three stay."""
    for value in range(10):
        save_value(tmp_path, float(value), keep=3)

    assert _names(tmp_path) == [f"checkpoint-0000000{n}" for n in (8, 9)] + [
        "checkpoint-00000010"
    ]


def test_the_last_valid_one_is_never_deleted(tmp_path: Path) -> None:
    """A checkpoint that is not whole is not counted among those that are kept."""
    for value in (1.0, 2.0, 3.0):
        save_value(tmp_path, value)
    for number in (2, 3):
        (tmp_path / f"checkpoint-0000000{number}" / "model-00000.json").unlink()

    save_value(tmp_path, 4.0, keep=2)

    assert _names(tmp_path) == [f"checkpoint-0000000{n}" for n in (1, 2, 3, 4)]


def test_nothing_is_deleted_that_was_not_written_here(tmp_path: Path) -> None:
    """Others' files and directories stay, also inside of a checkpoint."""
    (tmp_path / "checkpoint-00000000").mkdir()
    (tmp_path / "checkpoint-00000000" / "manifest.json").write_text("{}")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-00000009~").mkdir()
    (tmp_path / "checkpoint-00000009~" / "mine.txt").write_text("keep me")
    (save_value(tmp_path, 1.0) / "notes.txt").write_text("the good one")
    for value in (2.0, 3.0, 4.0):
        save_value(tmp_path, value, keep=1)

    assert _names(tmp_path) == [
        "checkpoint-00000000",
        "checkpoint-00000009~",
        "checkpoint-00000010",
        "checkpoint-00000013",
        "checkpoint-best",
    ]
    assert newest_value(tmp_path / "checkpoint-00000010") == 1.0


def test_two_processes_do_not_share_a_directory(tmp_path: Path) -> None:
    """A second island that saves to the same directory gets an error with a remedy."""
    with Saver(tmp_path, {"model": Weights(1.0)}) as saver:
        saver.save()
        with pytest.raises(UsageError, match="Give every island its own directory"):
            save_value(tmp_path, 2.0)

    assert save_value(tmp_path, 2.0).name == "checkpoint-00000002"


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    """A state of more text than a reader accepts is refused when it is saved."""
    trainer = {"log": "x" * (2**28 + 1)}

    with pytest.raises(UsageError, match=r"state of trainer is 2684.* bytes of JSON"):
        atoll.checkpoint.save(tmp_path, {"trainer": trainer}, components=["trainer"])
    with pytest.raises(UsageError, match=r"metadata= is .* limit of 65536"):
        atoll.checkpoint.save(
            tmp_path, {"model": Weights()}, metadata={"log": "x" * 2**17}
        )


def _fail_while_saving(root: Path) -> None:
    with Saver(root, {"model": Weights(1.0)}) as saver:
        saver.save()
        raise ZeroDivisionError


def test_a_training_that_fails_keeps_what_was_being_saved(tmp_path: Path) -> None:
    """An error in the block is raised unchanged; a copied checkpoint is written."""
    with pytest.raises(ZeroDivisionError):
        _fail_while_saving(tmp_path)

    assert newest_value(tmp_path) == 1.0
    assert save_value(tmp_path, 2.0).name == "checkpoint-00000002"


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    """keep=0 would delete the checkpoint just written, and is refused."""
    with pytest.raises(UsageError, match="keep=0 would keep nothing"):
        save_value(tmp_path, 1.0, keep=0)


def test_a_saver_restores_what_it_has_saved(tmp_path: Path) -> None:
    """Random states of the process are restored, too: the next draws are equal."""
    with Saver(tmp_path, {"model": Weights(2.0)}) as saver:
        assert saver.save()
    drawn = random.random()

    model = Weights(1.0)
    with Saver(tmp_path, {"model": model}) as saver:
        loaded = saver.restore()

    assert loaded is not None
    assert set(loaded.restored) == {"model", "rng"}
    assert model.value == 2.0
    assert random.random() == drawn


def test_more_may_be_restored_than_is_saved(tmp_path: Path) -> None:
    """A saver that saves no weights restores those that an older checkpoint has."""
    save_value(tmp_path, 2.0)
    model = Weights(1.0)

    with Saver(tmp_path, {"model": model}, components=["rng"]) as saver:
        loaded = saver.restore()
        assert loaded is not None
        assert (loaded.restored, loaded.fresh) == ((), ("rng",))
        saver.restore(components=["model"])

    assert model.value == 2.0


def test_an_island_reads_its_part_before_anything_is_restored(tmp_path: Path) -> None:
    """A component's state can be looked at, arrays as new memory, objects untouched."""
    save_value(tmp_path, 2.0)
    model = Weights(1.0)

    with Saver(tmp_path, {"model": model}) as saver:
        state = saver.read("model")
        assert saver.read("island") is None

    assert isinstance(state, dict)
    assert np.array_equal(state["array"], np.full(8, 2.0, np.float32))
    assert state["array"].flags.writeable
    assert model.value == 1.0
