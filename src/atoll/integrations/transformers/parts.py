"""The island's part of a checkpoint that `transformers.Trainer` has written.

Rule 1: the part is written last, durable, and names the files beside it by number and
        size. A checkpoint without it, or with other files, was cut short.
Rule 2: the part and `trainer_state.json` carry one token. A part that was left by
        another save is never taken for this one's.
Rule 3: the newest checkpoint is the one that was saved last, not that of most steps:
        who goes back by hand goes on from there.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerState

from atoll import checkpoint
from atoll.errors import AtollWarning, CorruptError
from atoll.island.checkpoints import IslandComponent
from atoll.island.saved_state import SavedIsland
from atoll.torch.trainer_hooks import Seat

PART = "island"
STATE = "trainer_state.json"
_OURS = "atoll"
"""Under which the trainer's own state keeps the token."""


def newest(output_dir: str | Path) -> str | None:
    """Return the checkpoint that was saved last and is whole; None if there is none.

    For `trainer.train(resume_from_checkpoint=newest(output_dir))`, which begins anew
    where there is none. Warns of checkpoints that are passed over.
    """
    found = {path: _number_if_whole(path) for path in _checkpoints(Path(output_dir))}
    whole = {path: number for path, number in found.items() if number is not None}
    cut_short = sorted(path.name for path in found.keys() - whole.keys())
    if cut_short:
        warnings.warn(
            f"Passed over in {output_dir}, cut short while it was saved or not of an "
            f"island: {', '.join(cut_short)}.",
            AtollWarning,
            stacklevel=2,
        )
    return str(max(whole, key=lambda path: whole[path])) if whole else None


def last_number(output_dir: Path) -> int:
    """Return the number of the last save in a directory; 0 if there was none."""
    numbers = [_number_if_whole(path) for path in _checkpoints(output_dir)]
    return max((each for each in numbers if each is not None), default=0)


def forget_part(path: Path) -> None:
    """Mark a checkpoint as cut short, before the trainer writes over it."""
    if (path / PART).is_dir():
        shutil.rmtree(path / PART)


def save_part(
    seat: Seat, path: Path, state: TrainerState, *, number: int, is_leader: bool
) -> None:
    """Finish a checkpoint that the trainer has written; all ranks call it."""
    token = secrets.token_hex(16)
    if is_leader:
        forget_part(path)
        ours = {"token": token, "path": str(path.resolve())}
        state.stateful_callbacks[_OURS] = {"args": {}, "attributes": ours}
        state.save_to_json(str(path / STATE))
    count, size_bytes = _made_durable(path) if is_leader else (0, 0)
    metadata = {
        "token": token,
        "number": number,
        "step": state.global_step,
        "num_files": count,
        "size_bytes": size_bytes,
    }
    with seat.part() as part:
        checkpoint.save(
            path / PART, {PART: part}, components=[PART], metadata=metadata, keep=1
        )


def find_part(state: TrainerState, output_dir: Path) -> SavedIsland | None:
    """Return the island of the checkpoint that the trainer goes on from, if known.

    The trainer does not say from which directory it was loaded; the token tells.
    """
    if not state.global_step:
        return None
    ours = state.stateful_callbacks.get(_OURS, {}).get("attributes", {})
    places = [output_dir / f"checkpoint-{state.global_step}"]
    places += [Path(ours["path"])] if "path" in ours else []
    for place in places:
        found = checkpoint.newest(place / PART) if (place / PART).is_dir() else None
        if found is not None and found.metadata.get("token") == ours.get("token"):
            part = IslandComponent()
            checkpoint.load(place / PART, {PART: part}, components=[PART])
            return part.saved
    warnings.warn(
        f"The trainer goes on at step {state.global_step}, and no island was saved "
        "with its checkpoint: what it had learnt since the last round is lost.",
        AtollWarning,
        stacklevel=2,
    )
    return None


def _checkpoints(output_dir: Path) -> list[Path]:
    return [
        path
        for path in sorted(output_dir.glob("checkpoint-*"))
        if path.is_dir() and path.name.removeprefix("checkpoint-").isdecimal()
    ]


def _number_if_whole(path: Path) -> int | None:
    """Return which save wrote a checkpoint; None if it is not whole."""
    try:
        found = checkpoint.newest(path / PART)
        state = json.loads((path / STATE).read_bytes())
    except (CorruptError, OSError, ValueError):
        return None
    if found is None:
        return None
    ours = state.get("stateful_callbacks", {}).get(_OURS, {}).get("attributes", {})
    is_same = ours.get("token") == found.metadata.get("token")
    files = found.metadata.get("num_files"), found.metadata.get("size_bytes")
    number: Any = found.metadata.get("number")
    return int(number) if is_same and files == _measured(path) else None


def _measured(path: Path) -> tuple[int, int]:
    sizes = [file.stat().st_size for file in _files(path)]
    return len(sizes), sum(sizes)


def _made_durable(path: Path) -> tuple[int, int]:
    for file in _files(path):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return _measured(path)


def _files(path: Path) -> list[Path]:
    """Return the files of a checkpoint but for the island's own."""
    return [
        file
        for file in path.rglob("*")
        if file.is_file() and file.relative_to(path).parts[0] != PART
    ]
