"""Creates and opens runs in a bucket: settings, bundle, and the first weights.

The first island puts its states under a nonce of its own; one document, put once, makes
them the states of the run.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from atoll.bundle import MAX_BYTES, Bundle, defined_by
from atoll.bundle.archive import MAX_CODE_BYTES
from atoll.errors import CorruptError, FoundingLost, NoSuchObject, UsageError
from atoll.exchange.base import Constants, Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import (
    RESTORE,
    RunDocument,
    SettingsDocument,
    fetch,
    packed,
)
from atoll.exchange.bucket.large_objects import put_constant
from atoll.exchange.bucket.reader import BucketReader, require_no_remains
from atoll.exchange.bucket.runtime import ThreadTiming
from atoll.protocol import JoinRequest, ModelSpec, TensorSpec
from atoll.protocol.model import to_bring
from atoll.settings import RunSettings
from atoll.store import ProbedStore, RetryingStore, Store, open_store
from atoll.weights import lay_out, require_state, terms_of
from atoll.wire import blake3_digest, pack
from atoll.wire.digests import Bytes

NONE: Mapping[TensorSpec, Iterable[Bytes]] = MappingProxyType({})


def make_run(
    store: Store, settings: RunSettings, *, url: str, bundle: Bundle | None = None
) -> SettingsDocument:
    """Make a run where there is none; its first island founds it.

    Raises:
        UsageError: there is one, the store cannot keep one, or its settings name a
            bundle that is not given.
    """
    require_able(store, settings, url=url)
    if settings.run.bundle != (bundle.digest if bundle else None):
        raise UsageError(
            f"The settings have run.bundle={settings.run.bundle!r}, and "
            f"{bundle.digest if bundle else 'no bundle'} is given. Give the directory "
            "that it was made of: --bundle DIR."
        )
    if bundle is not None and not is_run(store):
        # Under its digest, so that of two who begin a run here each has its own.
        store.put(keys.bundle(bundle.digest), [bundle.data])
    document = SettingsDocument(
        run=f"{settings.run.name}-{secrets.token_hex(6)}",
        fingerprint=settings.fingerprint,
        settings=settings,
    )
    if not is_run(store):
        require_no_remains(store, url=url)
    said = packed(documents.SETTINGS, document, keys.SETTINGS)
    if store.put_new(keys.SETTINGS, said):
        return document
    there = fetch(store, documents.SETTINGS, keys.SETTINGS)
    raise UsageError(
        f"There is a run at {url} already, {there.run!r}. "
        "Choose another URL, or remove what is there."
    )


def require_able(store: Store, settings: RunSettings, *, url: str) -> None:
    """Return if a store can decide what is first, or the settings name who does.

    Raises:
        UsageError: neither.
    """
    if not store.traits.has_put_new and settings.store.decider is None:
        raise UsageError(
            f"The store at {url} lets a second object replace the first, so that two "
            "islands could close one round in two ways. Use another store, or name "
            "one island that closes every round: `--set store.decider=NAME`."
        )


def found_run(
    store: Store,
    document: SettingsDocument,
    model: ModelSpec,
    states: Sequence[Frame],
    constants: Mapping[TensorSpec, Iterable[Bytes]] = NONE,
) -> None:
    """Give a run its first weights, one state of round 0 for each fragment.

    `constants` are those that it keeps, each with its bytes.

    Raises:
        UsageError: it has some.
    """
    nonce = secrets.token_hex(16)
    layout = lay_out(model, document.settings)
    digests = []
    for fragment, frame in enumerate(states):
        terms = terms_of(layout[fragment], document.settings)
        require_state(frame.header, layout[fragment], terms, round=0)
        key = keys.founding(nonce, fragment)
        head = pack(frame.header)
        store.put(key, [head, frame.body.data])
        digests.append(blake3_digest(head))
    for constant, parts in constants.items():
        put_constant(store.put, nonce, constant, parts)
    founded = RunDocument(
        run=document.run,
        fingerprint=document.fingerprint,
        founding=nonce,
        model=model,
        constants=tuple(each.digest for each in constants),
        states=tuple(digests),
    )
    if not store.put_new(keys.RUN, packed(documents.RUN, founded, keys.RUN)):
        raise UsageError(
            f"Run {document.run!r} has been founded. Its weights stay as they are."
        )


def is_run(store: Store) -> bool:
    """Return whether somebody has made a run in a store."""
    try:
        store.get(keys.SETTINGS, 0, 1)
    except NoSuchObject:
        return False
    return True


COORDINATOR = ("address.json", "journal")
"""What lies in a coordinator's directory, and in no run of a store."""


def init(url: str, settings: RunSettings, *, bundle: str | Path | None = None) -> str:
    """Make a run in an object store or a directory, and return its id.

    `bundle` is a directory that defines the model: configuration, code and tokenizer.

    Its first island founds it with its weights. Safe to repeat: a run that is there
    stays as it is.

    Raises:
        UsageError: there is a run already, the URL is wrong, or the store cannot keep
            a run; nothing has been made then.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    require_no_coordinator(url)
    packed = None if bundle is None else Bundle.of_directory(bundle)
    settings = defined_by(packed, settings)
    timing = ThreadTiming()
    try:
        store = reliable(url, timing.pause)
        return make_run(store, settings, url=url, bundle=packed).run
    finally:
        timing.close()


def reliable(url: str, pause: Callable[[float], None]) -> Store:
    """Return the store at a URL: asked again when it fails, and known for what it can.

    Raises:
        UsageError: the URL is wrong, or what goes there is not installed.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    return ProbedStore(RetryingStore(open_store(url), pause=pause))


def directory_of(url: str) -> Path | None:
    """Return the directory that a URL names; None if it is no directory's."""
    if "://" not in url:
        return Path(url)
    said = urlsplit(url)
    return Path(unquote(said.path)) if said.scheme.lower() == "file" else None


def require_no_coordinator(url: str) -> None:
    """Return unless a URL is the directory of a coordinator.

    Raises:
        UsageError: it is, and says how that is reached.
    """
    directory = directory_of(url)
    if directory is None or not any((directory / it).exists() for it in COORDINATOR):
        return
    raise UsageError(
        f"{url} is the directory of a coordinator, and holds no run that islands meet "
        f"in. Serve it, and give the URL that it prints: `atoll serve RUN.toml --dir "
        f"{url}`."
    )


def require_there(url: str) -> None:
    """Return if what a URL names can be looked at without making it.

    A store in a directory makes that directory; a misspelt one should not appear.

    Raises:
        UsageError: the directory is not there, or a coordinator's.
    """
    require_no_coordinator(url)
    directory = directory_of(url)
    if directory is not None and not directory.is_dir():
        raise no_run(url)


def no_run(url: str) -> UsageError:
    """Return the error for a URL where nobody has made a run."""
    return UsageError(
        f"There is no run at {url}. Make one first: `atoll init {url} RUN.toml`."
    )


class BucketFounder:
    """Puts first states under a nonce of its own; one document makes them the run's."""

    def __init__(self, lookout: BucketReader, nonce: str) -> None:
        self._lookout, self._store, self._nonce = lookout, lookout.store, nonce
        self._brought: dict[int, bytes] = {}
        """By fragment, the digest of the header of the state that was put."""

        self._kept: tuple[str, ...] = ()

    def keep(self, model: ModelSpec, constants: Constants) -> None:
        """Put the constants that the run keeps, if it does.

        Raises:
            UsageError: they are more than it keeps.
            CorruptError: one does not have its digest.
        """
        self._kept = ()
        wanted = to_bring(model, self._lookout.sight.settings)
        for each in wanted:
            put_constant(self._store.put, self._nonce, each, constants.parts(each))
        self._kept = tuple(each.digest for each in wanted)

    def bring(self, frame: Frame, request: JoinRequest | None) -> None:
        """Put a first state; the last one makes this a run, if no other has.

        Raises:
            FoundingLost: another island was first.
        """
        assert request is not None
        header, settings = frame.header, self._lookout.sight.settings
        layout = lay_out(request.model, settings)
        terms = terms_of(layout[header.fragment], settings)
        require_state(header, layout[header.fragment], terms, round=0)
        key = keys.founding(self._nonce, header.fragment)
        head = pack(header)
        self._store.put(key, [head, frame.body.data])
        self._brought[header.fragment] = blake3_digest(head)
        if len(self._brought) == len(layout):
            states = tuple(digest for _, digest in sorted(self._brought.items()))
            self._brought.clear()
            self._found(request, states)

    def _found(self, request: JoinRequest, states: tuple[bytes, ...]) -> None:
        document = RunDocument(
            run=self._lookout.run,
            fingerprint=self._lookout.sight.settings.fingerprint,
            founding=self._nonce,
            model=request.model,
            constants=self._kept,
            states=states,
        )
        if not self._lookout.look_founding():
            self._lookout.require_unfounded()
        run = packed(documents.RUN, document, keys.RUN)
        is_first = self._store.put_new(keys.RUN, run)
        if not self._lookout.look_founding():
            raise CorruptError(f"{keys.RUN} is gone: it was put just now. {RESTORE}")
        if not is_first:
            raise FoundingLost(
                "Another island has founded the run. Join again to take its weights."
            )


log = logging.getLogger("atoll")


def archive_in(store: Store, digest: str) -> bytes:
    """Return the archive that a run's settings name, as it is there.

    Raises:
        CorruptError: it is not there, or does not have the digest in its name.
    """
    key = keys.bundle(digest)
    try:
        data = bytes(store.get(key, 0, MAX_BYTES + 1))
    except NoSuchObject as exc:
        raise CorruptError(
            f"The run's settings name {key}, and there is none: somebody has removed "
            "it. Put it back from a copy."
        ) from exc
    if blake3_digest(data).hex() != digest:
        raise CorruptError(
            f"{key} was altered: it does not have the digest in its name. {RESTORE}"
        )
    return data


def bundle_in(store: Store, settings: RunSettings) -> Bundle | None:
    """Return what defines a run's model; None: every island brings it.

    Raises:
        CorruptError: it is not what the settings name, or is not there.
    """
    digest = settings.run.bundle
    if digest is None:
        return None
    return Bundle.of_archive(archive_in(store, digest), digest=digest)


def codes_in(store: Store) -> Iterator[tuple[str, bytes]]:
    """Yield the code that islands were launched with, each under its digest.

    What is not what its key says stays behind: no island would run it.
    """
    for item in store.items(keys.CODE):
        digest = item.key.removeprefix(keys.CODE)
        if item.size > MAX_CODE_BYTES:
            log.warning("%s has %d bytes, and stays behind", item.key, item.size)
            continue
        data = bytes(store.get(item.key, 0, MAX_CODE_BYTES))
        if blake3_digest(data).hex() != digest:
            log.warning("%s is not what its name says, and stays behind", item.key)
            continue
        yield digest, data
