"""An example as an island, whose last words are kept.

    python -m tests.e2e.trainer_island EXAMPLE OUTPUT TOLD

Its run and its name are in the environment, as whoever starts it has given them.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch

from atoll import kernels

EXAMPLES = Path(__file__).parents[2] / "examples"


def main(example: str, output: str, told: str) -> None:
    kernels.use("numpy")  # starts at once
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [example, output]
    written = Path(f"{told}.part")
    with written.open("w") as file, redirect_stdout(file):
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    written.rename(told)


if __name__ == "__main__":
    main(*sys.argv[1:])
