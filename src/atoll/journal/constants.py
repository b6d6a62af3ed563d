"""Constants on a disk: `constants/<digest>`, one file each.

Rule 1: a file is a constant once a record names it. Before that it is a draft, which a
        crash leaves for `open` to remove.
Rule 2: every part is durable before it is answered, so that no flush takes long; one
        draft at a time is written, and its digest is checked before it is recorded.
Rule 3: a damaged or missing constant counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from atoll.disk import (
    Disk,
    DiskSpace,
)
from atoll.errors import CorruptError, DiskError, NoSuchFile, UsageError
from atoll.journal.records import (
    ConstantRecord,
)
from atoll.journal.replay import (
    RecordedRun,
)
from atoll.protocol import TensorSpec
from atoll.protocol.model import bytes_of, keepable
from atoll.wire.digests import Blake3Hasher, Bytes, view_of

FOLDER = "constants/"
READ_BYTES = 2**24


@dataclass
class ConstantDraft:
    """A constant of which some parts have come."""

    digest: str
    size: int = 0
    digesting: Blake3Hasher = field(default_factory=Blake3Hasher)


class ConstantFiles:
    """Keeps a run's constants. One thread writes."""

    def __init__(
        self,
        disk: Disk,
        recorded: RecordedRun,
        note: Callable[[ConstantRecord], None],
        room: DiskSpace,
    ) -> None:
        self._disk, self._recorded, self._note = disk, recorded, note
        self._room = room
        self._draft: ConstantDraft | None = None
        self.complete: set[str] = set()
        """Digests of the complete constants."""

        self._sound: set[str] = set()
        """Digests of the constants that this process has read and verified."""

        self.damage: list[str] = []

    def open(self) -> None:
        """Find the complete constants, and remove files that no record names."""
        sizes = self._recorded.constants
        for name in self._disk.names(FOLDER):
            digest = name.removeprefix(FOLDER)
            if digest in sizes and self._has(digest, sizes[digest]):
                self.complete.add(digest)
            else:
                self._disk.remove(name)
        model = self._recorded.model
        for digest, constant in keepable(model).items() if model else ():
            if digest in sizes and digest not in self.complete:
                self.damage.append(
                    f"The constant {constant.name!r} is not in {name_of(digest)}: "
                    "an island that builds an empty model has to bring it."
                )

    def _has(self, digest: str, size: int) -> bool:
        """Return whether a file has its size, by its last byte alone."""
        try:
            return len(self._disk.read(name_of(digest), size - 1, 2)) == 1
        except NoSuchFile:
            return False

    def take(self, constant: TensorSpec, first: int, part: Bytes) -> int:
        """Store a part of a constant, and return the size stored so far.

        A part that does not begin where the others end changes nothing.

        Raises:
            UsageError: the constant would have more bytes than it has.
            CorruptError: it is whole, and does not have its digest: nothing is kept.
            DiskError: nothing of it is kept; bring it again.
        """
        size, view = bytes_of(constant), view_of(part)
        if constant.digest in self.complete:
            return size
        draft = self._draft_of(constant.digest)
        if first != draft.size or not view:
            return draft.size
        if first + len(view) > size:
            self._drop()
            raise UsageError(
                f"{constant.name!r} has {size} bytes, and {len(view)} more come after "
                f"{first}. Bring only its bytes."
            )
        try:
            self._add(draft, view)
            if draft.size == size:
                self._complete(draft, constant)
        except BaseException:
            self._drop()
            raise
        return draft.size

    def store(self, constant: TensorSpec, parts: Iterable[Bytes]) -> None:
        """Keep a whole constant.

        Raises:
            UsageError, CorruptError: the parts are not it.
            DiskError: nothing of it is kept.
        """
        stored_bytes = 0
        for part in parts:
            stored_bytes = self.take(constant, stored_bytes, part)
        if constant.digest not in self.complete and bytes_of(constant):
            self._drop()
            raise CorruptError(
                f"{stored_bytes} bytes came of {constant.name!r}, which has "
                f"{bytes_of(constant)}. Bring all of them."
            )

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[bytes]:
        """Yield a complete constant, from byte `first` on, in bounded parts."""
        for offset in range(first, bytes_of(constant), READ_BYTES):
            yield self._disk.read(name_of(constant.digest), offset, READ_BYTES)

    def require_sound(self, constant: TensorSpec) -> None:
        """Check the digest of a complete constant; it is read once per process.

        Raises:
            CorruptError: it has not, which is reported as damage, too.
        """
        if constant.digest in self._sound:
            return
        digesting = Blake3Hasher()
        for part in self.parts(constant):
            digesting.add(view_of(part))
        if digesting.digest.hex() != constant.digest:
            text = (
                f"{name_of(constant.digest)} is damaged: its content for the constant "
                f"{constant.name!r} does not have that digest. Restore the file from a "
                "copy of the journal."
            )
            if text not in self.damage:
                self.damage.append(text)
            raise CorruptError(text)
        self._sound.add(constant.digest)

    def keep_only(self, digests: Collection[str]) -> None:
        """Remove all other constants: they belong to another founder's model."""
        for digest in self.complete - set(digests):
            self.complete.discard(digest)
            with suppress(DiskError):  # a file that stays does no harm
                self._disk.remove(name_of(digest))

    def _draft_of(self, digest: str) -> ConstantDraft:
        if self._draft is None or self._draft.digest != digest:
            self._drop()
            self._disk.remove(name_of(digest))
            self._draft = ConstantDraft(digest)
        return self._draft

    def _add(self, draft: ConstantDraft, view: memoryview) -> None:
        name = name_of(draft.digest)
        with self._room.claiming(len(view), purpose="a constant"):
            self._disk.append(name, view)
            self._disk.sync(name)
        draft.digesting.add(view)
        draft.size += len(view)

    def _complete(self, draft: ConstantDraft, constant: TensorSpec) -> None:
        digest = draft.digesting.digest
        if digest.hex() != constant.digest:
            raise CorruptError(
                f"The upload of {constant.name!r} does not have the digest "
                f"{constant.digest[:12]} of that constant. Bring it again."
            )
        self._note(ConstantRecord(digest=digest, size=draft.size))
        self.complete.add(constant.digest)
        self._draft = None

    def _drop(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            self._disk.remove(name_of(draft.digest))


def name_of(digest: str) -> str:
    """Return the file of a constant."""
    return f"{FOLDER}{digest}"
