"""An island that goes where its run goes, as a process of its own.

python -m tests.e2e.following_island URL NAME --folder FOLDER
"""

from __future__ import annotations

from atoll import kernels
from atoll.island.environment import credentials_from_environment
from atoll.island.join import RunConnection
from atoll.runtime import SystemClock
from tests.e2e.island_process import arguments, live


def main() -> None:
    said = arguments().parse_args()
    kernels.use("numpy")  # starts at once
    clock, around = SystemClock(), credentials_from_environment()
    live(
        RunConnection(said.url, island=said.name, paths=around, clock=clock),
        said,
    )


if __name__ == "__main__":
    main()
