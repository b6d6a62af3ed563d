"""Errors, told from rank to rank: the same kind and the same words on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.errors import RemoteError, RunEnded
from atoll.exchange.forms.failures import FAILURES
from atoll.torch.ranks.line import Message

_BY_KIND = {each.kind: each for each in FAILURES}
_BY_CODE = {each.code: each for each in FAILURES}
_EXIT, _INTERRUPTED = "exit", "interrupted"


def to_message(error: BaseException, rank: int) -> Message:
    """Return what other ranks are told of an error that rank `rank` has met."""
    failure = _BY_KIND.get(type(error)) if isinstance(error, Exception) else None
    if failure is not None:
        said = {"error": failure.code, "message": str(error)}
        if failure.extra:
            said[failure.extra] = vars(error)[failure.extra]
        return said
    if isinstance(error, SystemExit):
        return {"error": _EXIT, "message": str(error.code or 0)}
    if not isinstance(error, Exception):
        return {"error": _INTERRUPTED, "message": f"Rank {rank} was interrupted."}
    message = f"Rank {rank} of this island failed: {type(error).__name__}: {error}"
    return {"error": "remote", "message": message}


def from_message(said: Message) -> BaseException:
    """Return the error that another rank has met."""
    code, message = said["error"], said["message"]
    if code == _EXIT:
        return SystemExit(int(message))
    if code == _INTERRUPTED:
        return RunEnded(message)
    failure = _BY_CODE.get(code)
    if failure is None:
        return RemoteError(message)
    extra = {failure.extra: said[failure.extra]} if failure.extra else {}
    return failure.kind(message, **extra)


@dataclass
class Failing:
    """The first thing that went wrong here, while the others go on."""

    error: Exception | None = None

    def attempt(self, work: Callable[[], object]) -> None:
        """Do something that nobody else waits for, unless something has failed."""
        if self.error is None:
            try:
                work()
            except Exception as exc:  # the leader tells everybody at the end
                self.error = exc

    def finish(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.error is not None:
            raise self.error
