"""From what a user writes after `--` to the words that are executed.

train.py --lr 1         a script
-m package.train        a module
package.train:main      a function, called with the arguments as text
python train.py         the same as train.py: the Python of the island's place
python -c CODE          that Python again, which torchrun cannot start
./anything              a program
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from atoll.errors import UsageError

MAX_WORDS, MAX_WORDS_BYTES = 1024, 2**16

CALLING = "atoll.launch.calling"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")


def check_command(command: Sequence[str], *, processes: int) -> None:
    """Return if it can be a command.

    Raises:
        UsageError: it is empty, too long, or nothing that torchrun could start.
    """
    if not command or not command[0]:
        raise UsageError(
            "There is no command. Write it after --, for example: -- python train.py"
        )
    size = sum(len(word.encode("utf-8", "surrogateescape")) for word in command)
    if len(command) > MAX_WORDS or size > MAX_WORDS_BYTES:
        raise UsageError(
            f"The command has {len(command)} words and {size} bytes; at most "
            f"{MAX_WORDS} and {MAX_WORDS_BYTES} can be given. Put them into a file."
        )
    if any("\0" in word for word in command):
        raise UsageError("The command has a word with a zero byte, which none can.")
    if processes < 1:
        raise UsageError(f"processes={processes}: an island has 1 or more.")
    if processes > 1 and python_words(command) is None:
        raise UsageError(
            f"processes={processes} needs a script, -m MODULE or module:function for "
            f"torchrun to start, and {command[0]!r} is a program."
        )


def python_words(command: Sequence[str]) -> list[str] | None:
    """Return what Python is given to run a command, or None if it is no Python."""
    words = list(command)
    if _PYTHON.fullmatch(words[0]) and len(words) > 1:
        words = words[1:]
    if words[0] == "-m":
        return words if len(words) > 1 else None
    if words[0].endswith(".py"):
        return words
    return ["-m", CALLING, *words] if _FUNCTION.fullmatch(words[0]) else None


def is_python(command: Sequence[str]) -> bool:
    """Return whether the Python of the island's place runs a command."""
    words = python_words(command)
    return words is not None or _PYTHON.fullmatch(command[0]) is not None


def spelt_out(
    command: Sequence[str], *, processes: int, python: str = "python"
) -> list[str]:
    """Return the words to execute, with the Python of the island's place."""
    words = python_words(command)
    if words is None:
        return [python, *command[1:]] if is_python(command) else list(command)
    if processes > 1:
        return [python, *TORCHRUN, f"--nproc-per-node={processes}", *words]
    return [python, *words]
