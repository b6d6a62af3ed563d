"""Random states: of generators that a program made, and those that the process has."""

from __future__ import annotations

import random
from typing import cast

import numpy as np

from atoll.checkpoint.faces import Holder, Path, face_named, present_faces
from atoll.errors import UsageError


class PythonRandom:
    """A generator of Python's `random`. Implements `Holder`."""

    is_replicated = False

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def state(self) -> object:
        return self._generator.getstate()

    def restore(self, state: object) -> None:
        self._generator.setstate(cast("tuple[object, ...]", state))

    def like(self, path: Path) -> object:
        return None


class NumpyRandom:
    """A generator of numpy, of either kind. Implements `Holder`."""

    is_replicated = False

    def __init__(self, generator: np.random.Generator | np.random.RandomState) -> None:
        self._generator = generator

    def state(self) -> object:
        if isinstance(self._generator, np.random.RandomState):
            return self._generator.get_state(legacy=False)
        return self._generator.bit_generator.state

    def restore(self, state: object) -> None:
        if isinstance(self._generator, np.random.RandomState):
            self._generator.set_state(cast("dict[str, object]", state))
        else:
            self._generator.bit_generator.state = cast("dict[str, object]", state)

    def like(self, path: Path) -> object:
        return None


class ProcessRandom:
    """What `random`, numpy and the frameworks draw from by default.

    Implements `Stateful`.
    """

    def state_dict(self) -> object:
        frameworks = {name: face.random() for name, face in present_faces().items()}
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            **{name: each.state() for name, each in frameworks.items() if each},
        }

    def load_state_dict(self, state: object, /) -> None:
        if not isinstance(state, dict):
            raise UsageError("rng.process is not a dict of random states.")
        held = dict(state)
        random.setstate(held.pop("python"))
        np.random.set_state(held.pop("numpy"))
        for name, each in held.items():
            _random_of(name).restore(each)


def _random_of(name: str) -> Holder:
    holder = face_named(name).random()
    if holder is None:
        raise UsageError(f"rng.process has a state of {name}, which has none.")
    return holder
