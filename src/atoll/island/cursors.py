"""Where an island stood in its data at each of its last seals.

The run says how far an island's work has counted, and that is always a seal. Rows up
to there are not trained again, if the data can be put where it was then.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from atoll.checkpoint import Saver
from atoll.checkpoint.loading import restore
from atoll.checkpoint.ranks import Alone
from atoll.disk.failures import translated


class Cursors:
    """Saves the state of an island's data, one small checkpoint per seal."""

    def __init__(self, directory: Path, data: object) -> None:
        self._directory, self._data = directory, data
        self._last = -1

    def keep(self, inner_steps: int, *, least: int) -> None:
        """Keep where the data stands now; nobody will ask for what is below `least`.

        It is durable when this returns, and before the update is sent that may count.
        """
        if inner_steps == self._last:
            return  # several fragments are sealed at once
        self._last = inner_steps
        self._sweep(least)
        path = self._directory / str(inner_steps)
        with self._saver(path) as saver:
            saver.save_and_wait({"inner_steps": inner_steps})

    def put_back(self, inner_steps: int) -> bool:
        """Put the data where it stood after so many steps; False: nobody knows."""
        path = self._directory / str(inner_steps)
        if not path.is_dir():
            return False
        found = self._saver(path).find()
        if found is None:
            return False
        restore(found, {"data": self._data}, ("data",), Alone())
        return True

    def _saver(self, path: Path) -> Saver:
        objects = {"data": self._data}
        return Saver(path, objects, components=["data"], keep=1, ranks=Alone())

    def _sweep(self, least: int) -> None:
        with translated(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            for path in self._directory.iterdir():
                if path.name.isdigit() and int(path.name) < least:
                    shutil.rmtree(path)
