"""How the first island of a run in a bucket gives it its weights."""

from __future__ import annotations

from atoll.errors import CorruptError, FoundingLost
from atoll.exchange.base import Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.constants import put_constant
from atoll.exchange.bucket.documents import RESTORE, RunDocument, packed
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.constants import Constants
from atoll.protocol import JoinRequest, ModelSpec
from atoll.protocol.constants import to_bring
from atoll.weights import lay_out, require_state, terms_of
from atoll.wire import blake3_digest, pack


class Founder:
    """Puts first states under a nonce of its own; one document makes them the run's."""

    def __init__(self, lookout: Lookout, nonce: str) -> None:
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
