"""Which kernels serve a process, and what happens where numba cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from atoll import kernels
from atoll.errors import UsageError
from atoll.kernels import with_numba, with_numpy
from tests.kernels.vectors import serving

ENCODE = (
    "import numpy as np; from atoll.wire import codec; from atoll import kernels;"
    "body = np.empty(260, np.uint8); x = np.arange(256, dtype=np.float32);"
    "codec('int8').encode(x, body); print(kernels.active().__name__, body.sum())"
)


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return done.stdout.strip()


def test_both_kinds_hold_the_same_functions() -> None:
    """Whatever one offers the other offers, under the same name."""
    assert with_numba.__all__ == with_numpy.__all__


def test_numba_serves_where_it_imports() -> None:
    """Nobody need ask for the fast kernels."""
    code = "from atoll import kernels; print(kernels.active().__name__)"

    assert run_python(code) == "atoll.kernels.with_numba"


def test_without_numba_numpy_serves_the_same_bytes() -> None:
    """An interpreter that has no numba encodes as one that has it."""
    without = "import sys; sys.modules['numba'] = None;"

    with_it, without_it = run_python(ENCODE), run_python(without + ENCODE)

    assert without_it == with_it.replace("with_numba", "with_numpy")


def test_asking_for_numba_in_vain_is_an_error() -> None:
    """What was asked for and cannot be had is never replaced in silence."""
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from atoll import errors, kernels\n"
        "try: kernels.use('numba')\n"
        "except errors.UsageError as e: print(e)\n"
    )

    assert 'pip install "atoll[fast]"' in run_python(code)


def test_an_unknown_kind_is_refused() -> None:
    """The message lists the kinds there are."""
    with pytest.raises(UsageError, match=r"'cuda' do not exist.*numba.*numpy"):
        kernels.use("cuda")


def test_kernels_compile_where_no_cache_can_be_written() -> None:
    """Without any folder to write to, numba compiles anew in every process."""
    # Numba is told to look only where NUMBA_CACHE_DIR points, and that is not set.
    nowhere = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}

    assert run_python(ENCODE, **nowhere) == run_python(ENCODE)


def test_a_choice_can_be_taken_back() -> None:
    """`use` holds until it is called again."""
    with serving("numpy"):
        assert kernels.active() is with_numpy
    with serving("numba"):
        assert kernels.active() is with_numba
