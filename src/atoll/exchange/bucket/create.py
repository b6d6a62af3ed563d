"""Creates and opens runs in a bucket: settings, bundle, and the first weights.

The first island puts its states under its own nonce; one document, put once, makes them
the states of the run.
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
from atoll.errors import (
    CorruptError,
    FoundingLost,
    NoSuchObject,
    UsageError,
)
from atoll.exchange.base import Constants, Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import RESTORE
from atoll.exchange.bucket.large_objects import put_constant
from atoll.exchange.bucket.reader import BucketReader
from atoll.protocol import JoinRequest, ModelSpec, TensorSpec
from atoll.protocol.model import to_bring
from atoll.runtime import SystemRuntime
from atoll.settings import RunSettings
from atoll.store import ProbedStore, RetryingStore, Store, open_store
from atoll.weights import lay_out, require_state, terms_of
from atoll.wire import blake3_digest, pack
from atoll.wire.digests import Bytes

NONE: Mapping[TensorSpec, Iterable[Bytes]] = MappingProxyType({})


def make_run(
    store: Store, settings: RunSettings, *, url: str, bundle: Bundle | None = None
) -> documents.SettingsDocument:
    """Make a run in an empty store; its first island founds it.

    Raises:
        UsageError: there is a run, the store cannot keep one, or `bundle` is not the
            one that the settings name.
    """
    require_able(store, settings, url=url)
    if settings.run.bundle != (bundle.digest if bundle else None):
        raise UsageError(
            f"The settings have run.bundle={settings.run.bundle!r}, and "
            f"{bundle.digest if bundle else 'no bundle'} is given. Give the directory "
            "that it was made of: --bundle DIR."
        )
    if bundle is not None and not is_run(store):
        # Under its digest: two processes that make a run here do not collide.
        store.put(keys.bundle(bundle.digest), [bundle.data])
    document = documents.SettingsDocument(
        run=f"{settings.run.name}-{secrets.token_hex(6)}",
        fingerprint=settings.fingerprint,
        settings=settings,
    )
    if not is_run(store):
        documents.require_no_remains(store, url=url)
    data = documents.packed(documents.SETTINGS, document, keys.SETTINGS)
    if store.put_new(keys.SETTINGS, data):
        return document
    existing = documents.fetch(store, documents.SETTINGS, keys.SETTINGS)
    raise UsageError(
        f"There is a run at {url} already, {existing.run!r}. "
        "Choose another URL, or remove that run."
    )


def require_able(store: Store, settings: RunSettings, *, url: str) -> None:
    """Return if a store has a conditional put, or the settings name a decider.

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
    document: documents.SettingsDocument,
    model: ModelSpec,
    states: Sequence[Frame],
    constants: Mapping[TensorSpec, Iterable[Bytes]] = NONE,
) -> None:
    """Give a run its first weights, one state of round 0 for each fragment.

    `constants` are those that the run keeps, each with its bytes.

    Raises:
        UsageError: it has weights already.
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
    founded = documents.RunDocument(
        run=document.run,
        fingerprint=document.fingerprint,
        founding=nonce,
        model=model,
        constants=tuple(constant.digest for constant in constants),
        states=tuple(digests),
    )
    if not store.put_new(keys.RUN, documents.packed(documents.RUN, founded, keys.RUN)):
        raise UsageError(
            f"Run {document.run!r} has been founded. Its weights stay unchanged."
        )


def is_run(store: Store) -> bool:
    """Return whether a store holds a run."""
    try:
        store.get(keys.SETTINGS, 0, 1)
    except NoSuchObject:
        return False
    return True


COORDINATOR = ("address.json", "journal")
"""Files of a coordinator's directory that no run in a store has."""


def init(url: str, settings: RunSettings, *, bundle: str | Path | None = None) -> str:
    """Make a run in an object store or a directory, and return its id.

    `bundle` is a directory that defines the model: configuration, code and tokenizer.

    Its first island founds it with its weights. Safe to repeat: an existing run stays
    unchanged.

    Raises:
        UsageError: there is a run already, the URL is wrong, or the store cannot keep
            a run; nothing has been made then.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    require_no_coordinator(url)
    archive = None if bundle is None else Bundle.of_directory(bundle)
    settings = defined_by(archive, settings)
    runtime = SystemRuntime()
    try:
        store = reliable(url, runtime.sleep)
        return make_run(store, settings, url=url, bundle=archive).run
    finally:
        runtime.close()


def reliable(url: str, pause: Callable[[float], None]) -> Store:
    """Return the store at a URL, with retries and with its traits probed.

    Raises:
        UsageError: the URL is wrong, or the library for its scheme is not installed.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    return ProbedStore(RetryingStore(open_store(url), sleep=pause))


def directory_of(url: str) -> Path | None:
    """Return the directory that a URL names; None if it is no directory's."""
    if "://" not in url:
        return Path(url)
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme.lower() == "file" else None


def require_no_coordinator(url: str) -> None:
    """Return unless a URL is the directory of a coordinator.

    Raises:
        UsageError: it is; the message names the command to serve it.
    """
    directory = directory_of(url)
    if directory is None or not any(
        (directory / name).exists() for name in COORDINATOR
    ):
        return
    raise UsageError(
        f"{url} is the directory of a coordinator, and holds no run that islands meet "
        f"in. Serve it, and give the URL that it prints: `atoll serve RUN.toml --dir "
        f"{url}`."
    )


def require_there(url: str) -> None:
    """Return if the directory of a URL exists; other URLs are not checked.

    A store in a directory makes that directory; a misspelt one should not appear.

    Raises:
        UsageError: the directory does not exist, or is a coordinator's.
    """
    require_no_coordinator(url)
    directory = directory_of(url)
    if directory is not None and not directory.is_dir():
        raise no_run(url)


def no_run(url: str) -> UsageError:
    """Return the error for a URL without a run."""
    return UsageError(
        f"There is no run at {url}. Make one first: `atoll init {url} RUN.toml`."
    )


class BucketFounder:
    """Puts first states under its own nonce; one document makes them the run's."""

    def __init__(self, reader: BucketReader, nonce: str) -> None:
        self._reader, self._store, self._nonce = reader, reader.store, nonce
        self._state_digests: dict[int, bytes] = {}
        """By fragment, the digest of the header of the state that was put."""

        self._constants: tuple[str, ...] = ()

    def keep(self, model: ModelSpec, constants: Constants) -> None:
        """Put the constants that the run keeps, if it does.

        Raises:
            UsageError: they exceed the size that it keeps.
            CorruptError: one does not have its digest.
        """
        self._constants = ()
        wanted = to_bring(model, self._reader.view.settings)
        for constant in wanted:
            parts = constants.parts(constant)
            put_constant(self._store.put, self._nonce, constant, parts)
        self._constants = tuple(constant.digest for constant in wanted)

    def put_state(self, frame: Frame, request: JoinRequest | None) -> None:
        """Put a first state; the last one makes this a run, if no other has.

        Raises:
            FoundingLost: another island was first.
        """
        assert request is not None
        header, settings = frame.header, self._reader.view.settings
        layout = lay_out(request.model, settings)
        terms = terms_of(layout[header.fragment], settings)
        require_state(header, layout[header.fragment], terms, round=0)
        key = keys.founding(self._nonce, header.fragment)
        head = pack(header)
        self._store.put(key, [head, frame.body.data])
        self._state_digests[header.fragment] = blake3_digest(head)
        if len(self._state_digests) == len(layout):
            states = tuple(digest for _, digest in sorted(self._state_digests.items()))
            self._state_digests.clear()
            self._found(request, states)

    def _found(self, request: JoinRequest, states: tuple[bytes, ...]) -> None:
        document = documents.RunDocument(
            run=self._reader.run,
            fingerprint=self._reader.view.settings.fingerprint,
            founding=self._nonce,
            model=request.model,
            constants=self._constants,
            states=states,
        )
        if not self._reader.read_founding():
            self._reader.require_never_founded()
        run = documents.packed(documents.RUN, document, keys.RUN)
        is_first = self._store.put_new(keys.RUN, run)
        if not self._reader.read_founding():
            raise CorruptError(f"{keys.RUN} is gone: it was put just now. {RESTORE}")
        if not is_first:
            raise FoundingLost(
                "Another island has founded the run. Join again to take its weights."
            )


log = logging.getLogger("atoll")


def archive_in(store: Store, digest: str) -> bytes:
    """Return the archive that a run's settings name.

    Raises:
        CorruptError: it is missing, or does not have the digest in its name.
    """
    key = keys.bundle(digest)
    try:
        data = bytes(store.get(key, 0, MAX_BYTES + 1))
    except NoSuchObject as exc:
        raise CorruptError(
            f"The run's settings name {key}, and there is none: it was removed. "
            "Put it back from a copy."
        ) from exc
    if blake3_digest(data).hex() != digest:
        raise CorruptError(
            f"{key} was altered: it does not have the digest in its name. {RESTORE}"
        )
    return data


def bundle_in(store: Store, settings: RunSettings) -> Bundle | None:
    """Return the bundle that defines a run's model; None: every island brings it.

    Raises:
        CorruptError: it is missing, or not the one that the settings name.
    """
    digest = settings.run.bundle
    if digest is None:
        return None
    return Bundle.of_archive(archive_in(store, digest), digest=digest)


def codes_in(store: Store) -> Iterator[tuple[str, bytes]]:
    """Yield the code that islands were launched with, each under its digest.

    An object without the digest in its key is left out: no island would run it.
    """
    for item in store.items(keys.CODE):
        digest = item.key.removeprefix(keys.CODE)
        if item.size > MAX_CODE_BYTES:
            log.warning("%s has %d bytes, and is left out", item.key, item.size)
            continue
        data = bytes(store.get(item.key, 0, MAX_CODE_BYTES))
        if blake3_digest(data).hex() != digest:
            log.warning(
                "%s does not have the digest in its key, and is left out", item.key
            )
            continue
        yield digest, data
