"""The README's loop as a program of its own: `python -m tests.e2e.plain_loop`.

Its run and its name are in the environment, as whoever starts it has given them.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from atoll import kernels

EXAMPLE = Path(__file__).parents[2] / "examples" / "three_lines.py"


def main() -> None:
    kernels.use("numpy")  # starts at once
    example = runpy.run_path(str(EXAMPLE))
    run, name = os.environ["ATOLL_RUN"], os.environ["ATOLL_ISLAND"]
    example["train"](example["make_model"](), run, name)


if __name__ == "__main__":
    main()
