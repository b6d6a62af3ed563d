"""What is to be written, taken at one moment: trees as text, arrays as a copy.

A copy is what a training step waits for. Its memory is kept and used again, because
memory that was never touched costs several times the copy itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from atoll.checkpoint.array_file import MAX_ARRAYS
from atoll.checkpoint.arrays import Array, Bytes, HostArray, size_bytes
from atoll.checkpoint.mistrust import MAX_JSON_BYTES
from atoll.checkpoint.states import Objects, is_replicated, state_of
from atoll.checkpoint.tree import Encoder
from atoll.errors import UsageError

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Draft:
    """One component of one rank, ready to be written."""

    component: str
    tree: bytes
    arrays: Mapping[str, Array]


class Arena:
    """Memory of this machine that holds one snapshot after another."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def copy(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts with their arrays copied to here, over the last ones."""
        needed = sum(
            _room(array) for draft in drafts for array in draft.arrays.values()
        )
        if needed > len(self._memory):
            self._memory = np.empty(0, np.uint8)  # given back before more is asked
            self._memory = np.empty(needed, np.uint8)
        first = 0
        copies = []
        for draft in drafts:
            arrays: dict[str, Array] = {}
            for name, array in draft.arrays.items():
                size = size_bytes(array.kind, array.shape)
                into = self._memory[first : first + size]
                array.copy_to(into)
                arrays[name] = HostArray(into, array.kind, array.shape, array.offset)
                first += _room(array)
            copies.append(Draft(draft.component, draft.tree, arrays))
        return copies


def take(names: Iterable[str], objects: Objects, *, is_leader: bool) -> list[Draft]:
    """Return the drafts of some components; their arrays are still the objects' own.

    What all ranks hold alike is the leader's to write.

    Raises:
        UsageError: a state cannot be represented, and where.
    """
    drafts = []
    for name in names:
        value = objects[name]
        if not is_leader and is_replicated(value, objects):
            continue
        encoder = Encoder()
        tree = encoder.encode(state_of(value, objects), (name,))
        text = json.dumps({"tree": tree}, separators=(",", ":"), allow_nan=False)
        drafts.append(_readable(Draft(name, text.encode(), encoder.arrays)))
    return drafts


def _readable(draft: Draft) -> Draft:
    """Return a draft that whoever reads it will not find too large."""
    if len(draft.tree) > MAX_JSON_BYTES or len(draft.arrays) > MAX_ARRAYS:
        raise UsageError(
            f"The state of {draft.component} is {len(draft.tree)} bytes of JSON and "
            f"{len(draft.arrays)} arrays; at most {MAX_JSON_BYTES} and {MAX_ARRAYS} "
            "can be read again. Keep what is large in few arrays."
        )
    return draft


def _room(array: Array) -> int:
    size = size_bytes(array.kind, array.shape)
    return size + -size % _ALIGNMENT_BYTES
