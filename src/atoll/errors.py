"""Our exceptions.

AtollError
├── UsageError        the caller asked for something impossible
│   ├── SettingsError     a setting is unknown, out of range or contradicts another
│   ├── ModelError        names, shapes, dtypes or constants differ from the run's
│   ├── NonFinite         a value to be sent is NaN or infinite
│   ├── NoRows            the run's data has no part for this island
│   └── NoSuchFile        a file to read does not exist
├── RemoteError       someone else failed; retrying may help
│   ├── Unreachable       no answer arrived
│   ├── LeaseLost         another incarnation holds the island's name
│   ├── OutcomeLost       the outcome of a closed round is no longer stored
│   ├── Refused           the run refuses a message of this island
│   ├── RunMoved          the run has moved; the error holds its new address
│   ├── NoSuchObject      a store has no object at the key
│   ├── StoreDenied       a permission for the store is missing
│   └── DiskError         the disk failed; data that was not synced may be lost
│       └── DiskFull          it has no room
└── CorruptError      bytes did not verify; retrying will not help

RunEnded is not an error: it ends a training loop, and the `with` block of an
island swallows it. AtollWarning is not one either: the run continues as requested.
"""

from __future__ import annotations


class AtollError(Exception):
    """Anything Atoll raises on purpose."""


class UsageError(AtollError):
    """The caller asked for something impossible."""


class SettingsError(UsageError):
    """A setting is unknown, out of range or contradicts another."""


class ModelError(UsageError):
    """The model differs from the run's in names, shapes, dtypes or constants."""


class NonFinite(UsageError):
    """A value to be sent is NaN or infinite.

    `index` is its place in the flat vector, so that the caller can name the parameter.
    """

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class NoRows(UsageError):
    """The run's data has no part for this island: another start does not help."""


class NoSuchFile(UsageError):
    """A file to read does not exist."""


class RemoteError(AtollError):
    """Someone else failed; retrying may help."""


class Unreachable(RemoteError):
    """No answer arrived."""


class LeaseLost(RemoteError):
    """Another incarnation holds the island's name: stop sending."""


class OutcomeLost(RemoteError):
    """The outcome of a closed round is no longer stored: take the state instead."""


class Refused(RemoteError):
    """The run refuses a message of this island."""


class NameKnown(Refused):
    """The run knows an earlier incarnation of the name, which the request must name.

    A delayed join request of an earlier incarnation must not replace a later one.
    """

    def __init__(self, message: str, *, incarnation: int) -> None:
        super().__init__(message)
        self.incarnation = incarnation


class FoundingLost(Refused):
    """The island took too long to found the run: join again and take its weights."""


class RunMoved(RemoteError):
    """The run has moved: `target` is its new address."""

    def __init__(self, message: str, *, target: str) -> None:
        super().__init__(message)
        self.target = target


class NoSuchObject(RemoteError):
    """A store has no object at the key: it was never put, or has been collected."""

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


class StoreDenied(RemoteError, UsageError):
    """A permission for the store is missing."""


class DiskError(RemoteError):
    """The disk failed; data that was not synced may be lost."""


class DiskFull(DiskError):
    """The disk is full; after space is freed the call may be repeated."""


class DiskDenied(DiskError, UsageError):
    """The user may not write to this directory.

    It is a usage error when a process starts; a running process retries until the
    directory is writable again.
    """


class CorruptError(AtollError):
    """Bytes did not verify; retrying will not help."""


class RunEnded(Exception):
    """The run is over: it has reached its end, or an operator has stopped it."""


class AtollWarning(UserWarning):
    """The settings are valid, but cost something that was perhaps not meant."""


FINAL_EXIT = 6
"""The exit code of an island that must not be started again: it would end alike."""

# The first branch that fits decides.
_EXIT_CODES: tuple[tuple[type[AtollError], int], ...] = (
    (NoRows, FINAL_EXIT),
    (StoreDenied, 4),
    (UsageError, 2),
    (Refused, 4),
    (LeaseLost, 4),
    (RemoteError, 3),
    (CorruptError, 5),
    (AtollError, 1),
)


def exit_code(error: AtollError) -> int:
    """Return 2 for usage, 3 unreachable, 4 refused, 5 corrupt, 6 for `NoRows`."""
    return next(code for branch, code in _EXIT_CODES if isinstance(error, branch))
