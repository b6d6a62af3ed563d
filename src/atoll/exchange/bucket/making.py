"""Making a run in a bucket."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from atoll.bundle import Bundle
from atoll.errors import NoSuchObject, UsageError
from atoll.exchange.base import Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.constants import put_constant
from atoll.exchange.bucket.documents import (
    RunDocument,
    SettingsDocument,
    fetch,
    packed,
)
from atoll.exchange.bucket.lookout import require_no_remains
from atoll.protocol import ModelSpec, TensorSpec
from atoll.settings import RunSettings
from atoll.store import Store
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
