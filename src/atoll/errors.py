"""Our exceptions.

AtollError
├── UsageError        the caller asked for something impossible
│   ├── SettingsError     a setting is unknown, out of range or contradicts another
│   ├── ModelError        names, shapes, dtypes or constants differ from the run's
│   ├── NonFinite         a value to be sent is NaN or infinite
│   └── NoSuchFile        a file that is to be read is not there
├── RemoteError       someone else failed; retrying may help
│   ├── Unreachable       nobody answered
│   ├── LeaseLost         another incarnation holds the island's name
│   ├── OutcomeLost       a round is over, and nobody knows any more how it went
│   ├── Refused           the run will not take what this island sends
│   ├── RunMoved          the run goes on elsewhere, and says where
│   ├── NoSuchObject      a store has no object at the key
│   ├── StoreDenied       a store does not allow this: somebody must give a permission
│   └── DiskError         the disk failed; what was not synced may be lost
│       └── DiskFull          it has no room
└── CorruptError      bytes did not verify; retrying will not help

RunEnded is not an error: it ends a training loop, and the `with` block of an
island swallows it. AtollWarning is not one either: the run goes on as it was asked.
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


class NoSuchFile(UsageError):
    """A file that is to be read is not there."""


class RemoteError(AtollError):
    """Someone else failed; retrying may help."""


class Unreachable(RemoteError):
    """Nobody answered."""


class LeaseLost(RemoteError):
    """Another incarnation holds the island's name: stop sending."""


class OutcomeLost(RemoteError):
    """A round is over, and nobody knows any more how it went: take the state."""


class Refused(RemoteError):
    """The run will not take what this island sends."""


class NameKnown(Refused):
    """The run knows an earlier life of the name: say so to take its place.

    A joining of that life may still be under way, and must not take the place of one
    that came after it.
    """

    def __init__(self, message: str, *, incarnation: int) -> None:
        super().__init__(message)
        self.incarnation = incarnation


class FoundingLost(Refused):
    """The island took too long to found the run: join again and take its weights."""


class RunMoved(RemoteError):
    """The run goes on elsewhere: `target` is its name there."""

    def __init__(self, message: str, *, target: str) -> None:
        super().__init__(message)
        self.target = target


class NoSuchObject(RemoteError):
    """A store has no object at the key: it was never put, or has been collected."""

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


class StoreDenied(RemoteError, UsageError):
    """A store does not allow what is asked: somebody must give a permission first."""


class DiskError(RemoteError):
    """The disk failed; what was not synced may be lost."""


class DiskFull(DiskError):
    """The disk has no room: free some, and what failed may be repeated."""


class DiskDenied(DiskError, UsageError):
    """The disk lets this user write nothing there.

    Whoever starts something there has chosen wrongly; what runs already goes on when
    the disk can be written again.
    """


class CorruptError(AtollError):
    """Bytes did not verify; retrying will not help."""


class RunEnded(Exception):
    """The run is over: it has reached its end, or an operator has stopped it."""


class AtollWarning(UserWarning):
    """The settings are valid, but cost something that was perhaps not meant."""


# The first branch that fits decides.
_EXIT_CODES: tuple[tuple[type[AtollError], int], ...] = (
    (StoreDenied, 4),
    (UsageError, 2),
    (Refused, 4),
    (LeaseLost, 4),
    (RemoteError, 3),
    (CorruptError, 5),
    (AtollError, 1),
)


def exit_code(error: AtollError) -> int:
    """Return 2 for usage, 3 for unreachable, 4 for refused, 5 for corrupt."""
    return next(code for branch, code in _EXIT_CODES if isinstance(error, branch))
