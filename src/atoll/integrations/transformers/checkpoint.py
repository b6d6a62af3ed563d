"""The island's part of a checkpoint that `transformers.Trainer` has written.

Rule 1: the part is written last, durable, and names the files beside it by number and
        size. A checkpoint without it, or with other files, was cut short.
Rule 2: the part and `trainer_state.json` carry one token. A part that was left by
        another save is never used for this one.
Rule 3: the newest checkpoint is the one that was saved last, not the one with the most
        steps: after a user has gone back to an older one, the training continues there.
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
from atoll.torch.trainer_hooks import TrainerSession

PART = "island"
STATE = "trainer_state.json"
_STATE_KEY = "atoll"
"""Key of the token in the trainer's own state."""


def newest(output_dir: str | Path) -> str | None:
    """Return the complete checkpoint that was saved last; None if there is none.

    For `trainer.train(resume_from_checkpoint=newest(output_dir))`, which starts from
    the beginning if there is none. Warns of checkpoints that are passed over.
    """
    paths = _checkpoints(Path(output_dir))
    numbers = {path: _number_if_complete(path) for path in paths}
    complete = {path: number for path, number in numbers.items() if number is not None}
    cut_short = sorted(path.name for path in numbers.keys() - complete.keys())
    if cut_short:
        warnings.warn(
            f"Passed over in {output_dir}, cut short while it was saved or not of an "
            f"island: {', '.join(cut_short)}.",
            AtollWarning,
            stacklevel=2,
        )
    return str(max(complete, key=lambda path: complete[path])) if complete else None


def last_number(output_dir: Path) -> int:
    """Return the number of the last save in a directory; 0 if there was none."""
    numbers = [_number_if_complete(path) for path in _checkpoints(output_dir)]
    return max((number for number in numbers if number is not None), default=0)


def forget_part(path: Path) -> None:
    """Mark a checkpoint as cut short, before the trainer writes over it."""
    if (path / PART).is_dir():
        shutil.rmtree(path / PART)


def save_part(
    session: TrainerSession,
    path: Path,
    state: TrainerState,
    *,
    number: int,
    is_leader: bool,
) -> None:
    """Finish a checkpoint that the trainer has written; all ranks call it."""
    token = secrets.token_hex(16)
    if is_leader:
        forget_part(path)
        attributes = {"token": token, "path": str(path.resolve())}
        state.stateful_callbacks[_STATE_KEY] = {"args": {}, "attributes": attributes}
        state.save_to_json(str(path / STATE))
    count, size_bytes = _made_durable(path) if is_leader else (0, 0)
    metadata = {
        "token": token,
        "number": number,
        "step": state.global_step,
        "num_files": count,
        "size_bytes": size_bytes,
    }
    with session.part() as part:
        checkpoint.save(
            path / PART, {PART: part}, components=[PART], metadata=metadata, keep=1
        )


def find_part(state: TrainerState, output_dir: Path) -> SavedIsland | None:
    """Return the island of the checkpoint that the trainer resumes from, if known.

    The trainer does not report the directory that it was loaded from; the token
    identifies it.
    """
    if not state.global_step:
        return None
    attributes = state.stateful_callbacks.get(_STATE_KEY, {}).get("attributes", {})
    paths = [output_dir / f"checkpoint-{state.global_step}"]
    paths += [Path(attributes["path"])] if "path" in attributes else []
    for path in paths:
        saved = checkpoint.newest(path / PART) if (path / PART).is_dir() else None
        if saved and saved.metadata.get("token") == attributes.get("token"):
            part = IslandComponent()
            checkpoint.load(path / PART, {PART: part}, components=[PART])
            return part.saved
    warnings.warn(
        f"The trainer resumes at step {state.global_step}, and no island was saved "
        "with its checkpoint: the work since the last round is lost.",
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


def _number_if_complete(path: Path) -> int | None:
    """Return the number of the save that wrote a checkpoint; None if incomplete."""
    try:
        saved = checkpoint.newest(path / PART)
        state = json.loads((path / STATE).read_bytes())
    except (CorruptError, OSError, ValueError):
        return None
    if saved is None:
        return None
    callbacks = state.get("stateful_callbacks", {})
    attributes = callbacks.get(_STATE_KEY, {}).get("attributes", {})
    is_same = attributes.get("token") == saved.metadata.get("token")
    files = saved.metadata.get("num_files"), saved.metadata.get("size_bytes")
    number: Any = saved.metadata.get("number")
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
    """Return the files of a checkpoint except the island's own."""
    return [
        file
        for file in path.rglob("*")
        if file.is_file() and file.relative_to(path).parts[0] != PART
    ]
