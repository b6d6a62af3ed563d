"""Fuzzes the decoders of frames by coverage, with atheris.

    python -m tests.attacks.frame_fuzzing CORPUS -max_total_time=30

The options are those of libFuzzer. atheris is not among our dependencies: where it is
not installed, hypothesis does what it can.
"""

from __future__ import annotations

import importlib
import resource
import sys
from pathlib import Path

MAX_DATA_BYTES = 2 * 2**30


def main() -> None:
    # libFuzzer's own limit compares the peak of resident memory, which a process
    # inherits from the one that started it: a large test process would exceed it.
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["atoll.wire"]):
        target = importlib.import_module("tests.attacks.frame_target")
    for number, seed in enumerate(target.seeds()):
        (Path(sys.argv[1]) / f"seed-{number}").write_bytes(seed)
    atheris.Setup(sys.argv, target.feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
