"""Checkpoints of islands that are several processes: FSDP2, HSDP, DDP, a pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.nn.parallel import DistributedDataParallel

import atoll.checkpoint
from atoll.errors import AtollError, AtollWarning, UsageError
from tests.checkpoint.worlds import (
    assert_same,
    in_world,
    network,
    sharded,
    sharded_both_ways,
    train,
    whole_state,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _train_and_save(root: Path, model: nn.Module) -> None:
    """Save after three steps, and keep the weights after two more."""
    optimizer = _adam(model)
    train(model, optimizer, 3)
    trainer = {"rank": dist.get_rank()}
    objects = {"model": model, "optimizer": optimizer, "trainer": trainer}
    atoll.checkpoint.save(root, objects)
    train(model, optimizer, 2)
    expected = whole_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, root / "expected.pt")


def _restore_and_train(root: Path, model: nn.Module) -> None:
    """Restore into another model, make two steps, and be where the first one was."""
    optimizer = _adam(model)
    trainer = {"rank": -1}
    objects = {"model": model, "optimizer": optimizer, "trainer": trainer}
    loaded = atoll.checkpoint.load(root, objects)
    assert loaded is not None
    assert loaded.weights == "here"
    assert trainer["rank"] == dist.get_rank()
    train(model, optimizer, 2)
    assert_same(whole_state(model, optimizer), torch.load(root / "expected.pt"))


def _save_fsdp(folder: Path) -> None:
    _train_and_save(folder / "fsdp", sharded(0))


def _load_fsdp(folder: Path) -> None:
    _restore_and_train(folder / "fsdp", sharded(1))


def _save_ddp(folder: Path) -> None:
    _train_and_save(folder / "ddp", DistributedDataParallel(network(0)))


def _load_ddp(folder: Path) -> None:
    _restore_and_train(folder / "ddp", DistributedDataParallel(network(1)))


def _save_stages(folder: Path) -> None:
    torch.manual_seed(dist.get_rank())
    stage = nn.Linear(4, 4)
    atoll.checkpoint.save(folder / "stages", {"model": stage})
    torch.save(stage.state_dict(), folder / f"stage-{dist.get_rank()}.pt")


def _load_stages(folder: Path) -> None:
    stage = nn.Linear(4, 4)
    atoll.checkpoint.load(folder / "stages", {"model": stage})
    expected = torch.load(folder / f"stage-{dist.get_rank()}.pt")
    assert_same(stage.state_dict(), expected)


def _save_in_the_background(folder: Path) -> None:
    trainer = {"steps": 0}
    objects = {"trainer": trainer, "model": nn.Linear(2, 2)}
    with atoll.checkpoint.Saver(folder / "background", objects) as saver:
        for steps in range(1, 4):
            trainer["steps"] = steps
            assert saver.save(metadata={"steps": steps}, late=["trainer"])
            trainer["steps"] = 10 * steps + dist.get_rank()
            path = saver.wait()
            assert path is not None
            assert path.name == f"checkpoint-{steps:08d}"


def _load_from_the_background(folder: Path) -> None:
    trainer: dict[str, int] = {}
    loaded = atoll.checkpoint.load(
        folder / "background", {"trainer": trainer}, components=["trainer"]
    )
    assert loaded is not None
    assert loaded.metadata == {"steps": 3}
    assert trainer == {"steps": 30 + dist.get_rank()}


def _fail_on_one_rank(folder: Path) -> None:
    trainer = {"bad": object()} if dist.get_rank() == 1 else {"bad": 1}
    objects = {"model": nn.Linear(2, 2), "trainer": trainer}
    try:
        atoll.checkpoint.save(folder / "failed", objects)
    except AtollError as exc:
        (folder / f"error-{dist.get_rank()}").write_text(str(exc))


def _load_what_one_process_saved(folder: Path) -> None:
    model = sharded(1)
    optimizer = _adam(model)
    objects = {"model": model, "optimizer": optimizer}
    atoll.checkpoint.load(folder / "single", objects, components=list(objects))
    state = whole_state(model, optimizer)
    assert_same(state, torch.load(folder / "single" / "expected.pt"))


def _read_by_torch(folder: Path) -> None:
    checkpoint = atoll.checkpoint.newest(folder / "fsdp")
    assert checkpoint is not None
    alone = folder / f"weights-{dist.get_rank()}"
    alone.mkdir()
    for path in checkpoint.path.glob("model-*.safetensors"):
        (alone / path.name).symlink_to(path)
    full_state, resharded = sharded(1).state_dict(), sharded(2)
    load_by_torch(full_state, storage_reader=HuggingFaceStorageReader(str(alone)))
    atoll.checkpoint.load(folder / "fsdp", {"model": resharded}, components=["model"])
    for name, value in resharded.state_dict().items():
        assert torch.equal(value.to_local(), full_state[name].to_local()), name


def _load_elsewhere(folder: Path) -> None:
    model = sharded(1)
    optimizer = _adam(model)
    objects = {"model": model, "optimizer": optimizer}
    atoll.checkpoint.load(folder / "fsdp", objects, components=list(objects))
    train(model, optimizer, 2)
    state = whole_state(model, optimizer)
    for name, value in torch.load(folder / "fsdp" / "expected.pt").items():
        # Another number of ranks reduces gradients in another order.
        torch.testing.assert_close(state[name], value)


def _save_hsdp(folder: Path) -> None:
    _train_and_save(folder / "hsdp", sharded(0, (2, 2)))


def _load_hsdp(folder: Path) -> None:
    _restore_and_train(folder / "hsdp", sharded(1, (2, 2)))


def _save_both_ways(folder: Path) -> None:
    _train_and_save(folder / "both", sharded_both_ways(0))


def _load_both_ways(folder: Path) -> None:
    _restore_and_train(folder / "both", sharded_both_ways(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints that worlds of two ranks have saved."""
    folder = tmp_path_factory.mktemp("saved")
    in_world(
        2,
        folder,
        _save_fsdp,
        _save_ddp,
        _save_stages,
        _save_in_the_background,
        _fail_on_one_rank,
    )
    return folder


@pytest.fixture(scope="module")
def loaded(saved: Path) -> Path:
    """Return that folder after other worlds of two ranks have restored all of it."""
    model = network(0)
    optimizer = _adam(model)
    train(model, optimizer, 3)
    single = saved / "single"
    atoll.checkpoint.save(single, {"model": model, "optimizer": optimizer})
    torch.save(whole_state(model, optimizer), single / "expected.pt")
    in_world(
        2,
        saved,
        _load_fsdp,
        _load_ddp,
        _load_stages,
        _load_from_the_background,
        _load_what_one_process_saved,
        _read_by_torch,
    )
    return saved


def _newest(root: Path) -> atoll.checkpoint.Found:
    checkpoint = atoll.checkpoint.newest(root)
    assert checkpoint is not None
    return checkpoint


def test_islands_of_ranks_go_on_bit_for_bit(loaded: Path) -> None:
    """FSDP2, DDP and stages save weights and momentum, and continue exactly from them.

    So do ranks that restore what one process saved whole, and torch's own reader of
    safetensors in torch.distributed.checkpoint, of our pieces.
    """
    for kind in ("fsdp", "ddp", "stages"):
        assert _newest(loaded / kind).weights == "here"


def test_every_rank_writes_its_own_pieces(saved: Path) -> None:
    """Of FSDP2 there is a file of every rank, with its half of each weight."""
    checkpoint = _newest(saved / "fsdp")

    sizes = [
        checkpoint.manifest.files[f"model-0000{rank}.safetensors"].size_bytes
        for rank in range(2)
    ]
    assert max(sizes) < 1.5 * min(sizes)
    assert checkpoint.manifest.num_ranks == 2


def test_a_ddp_island_writes_its_weights_once(saved: Path) -> None:
    """The leader writes replicated state of DDP; each rank writes its own state."""
    files = _newest(saved / "ddp").manifest.files

    assert "model-00000.safetensors" in files
    assert "model-00001.safetensors" not in files
    assert "optimizer-00001.safetensors" not in files
    assert "trainer-00001.json" in files


@pytest.mark.parametrize("lost", ["optimizer-00001.safetensors", "model-00001.json"])
def test_a_checkpoint_without_one_ranks_file_is_passed_over(
    saved: Path, tmp_path: Path, lost: str
) -> None:
    """A checkpoint without a file of one rank is not valid; the warning names it."""
    first = saved / "fsdp" / "checkpoint-00000001"
    shutil.copytree(first, tmp_path / "checkpoint-00000001")
    shutil.copytree(first, tmp_path / "checkpoint-00000002")
    (tmp_path / "checkpoint-00000002" / lost).unlink()

    with pytest.warns(AtollWarning, match=f"{lost} is missing"):
        checkpoint = atoll.checkpoint.newest(tmp_path)

    assert checkpoint is not None
    assert checkpoint.number == 1


def test_pieces_are_put_together_for_another_number_of_ranks(saved: Path) -> None:
    """Shards of two ranks are restored as the shards of three ranks."""
    in_world(3, saved, _load_elsewhere)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_one_process_restores_what_ranks_saved(saved: Path, kind: str) -> None:
    """A model that ranks saved is restored whole where there is one process."""
    model = network(1)
    optimizer = _adam(model)
    objects = {"model": model, "optimizer": optimizer}

    atoll.checkpoint.load(saved / kind, objects, components=list(objects))

    train(model, optimizer, 2)
    state = whole_state(model, optimizer)
    for name, value in torch.load(saved / kind / "expected.pt").items():
        torch.testing.assert_close(state[name.removeprefix("module.")], value)


@pytest.mark.parametrize("name", ["trainer", "rng"])
def test_what_differs_by_rank_wants_the_same_ranks(saved: Path, name: str) -> None:
    """Rank-specific state cannot be restored by another number of ranks."""
    with pytest.raises(UsageError, match=rf"{name} was saved by 2 .*leave {name} out"):
        atoll.checkpoint.load(saved / "fsdp", {"trainer": {}}, components=[name])


def test_stages_that_look_alike_are_not_taken_for_one_another(saved: Path) -> None:
    """One process cannot restore a pipeline's stages, though their names are equal."""
    with pytest.raises(
        UsageError, match="model was saved by 2 ranks and is not the sam"
    ):
        atoll.checkpoint.load(saved / "stages", {"model": nn.Linear(4, 4)})


def test_what_one_rank_cannot_save_is_raised_on_all(saved: Path) -> None:
    """No rank waits for a failed one: each error names the rank and the reason."""
    errors = [(saved / f"error-{rank}").read_text() for rank in range(2)]

    assert errors[0].startswith("Rank 1: trainer.bad is of the type object")
    assert errors[1].startswith("trainer.bad is of the type object")
    assert atoll.checkpoint.newest(saved / "failed") is None


def test_replicas_of_a_piece_write_it_once(tmp_path: Path) -> None:
    """Of HSDP's four ranks two write the weights, and all four restore them.

    FSDP2 over tensor parallel, whose shards interleave, continues bit for bit, too.
    """
    in_world(4, tmp_path, _save_hsdp, _load_hsdp, _save_both_ways, _load_both_ways)

    path = tmp_path / "hsdp" / "checkpoint-00000001"
    assert (path / "model-00001.safetensors").exists()
    assert not (path / "model-00002.safetensors").exists()
