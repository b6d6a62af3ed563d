"""From a request to a call and from a reply to an answer: what islands ask.

Rule 1: a header is judged before its body is read. So is the proof that a request
        comes from the island that it speaks for, for all routes in one place.
Rule 2: nothing here decides: the office does, and every refusal is one of its errors.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from atoll.coordinator.first_weights import FirstWeights
from atoll.coordinator.join_limits import JoinLimits
from atoll.coordinator.office import Office
from atoll.coordinator.spool import MOVED_BYTES, Spool
from atoll.coordinator.state_uploads import StateUploads, require_foundable
from atoll.coordinator.states import StateFiles
from atoll.errors import AtollError, DiskError, Refused, RunEnded, Unreachable
from atoll.exchange import (
    LONG_POLL_S,
    AgreedCall,
    Call,
    HeartbeatCall,
    JoinCall,
    Outcome,
    OutcomeCall,
    Reply,
)
from atoll.exchange.forms import (
    MAX_LARGE_BYTES,
    PROOF_HEADER,
    Answer,
    Asked,
    Incoming,
    asked,
    error_parts,
    nowhere_parts,
    parse_call,
    parse_upload,
    receipt_headers,
    reply_parts,
    require_run,
)
from atoll.exchange.forms.constants import catalogue_parts
from atoll.exchange.forms.routes import Takes
from atoll.http import Body, FilePart, Later, Request, Response, origin_of, ranged
from atoll.journal import Journal
from atoll.journal.bodies import is_large
from atoll.journal.constants import name_of
from atoll.journal.stored import StoredBody
from atoll.protocol import Beat, Reception
from atoll.protocol.constants import bytes_of, has, keepable
from atoll.protocol.moving import require_here
from atoll.wire import MAX_HEADER_BYTES
from atoll.wire.digests import view_of
from atoll.wire.proof import island_proof

STATES_HEADERS_BYTES = 2 * MAX_HEADER_BYTES
"""What the headers before states may take, those of the last outcomes included."""

SMALL_BYTES, KEPT_BODIES = 2**16, 16
"""Bodies of outcomes that are kept for those who have not taken them yet."""

REDUCTIONS = 4
"""Bodies of rounds that islands have reduced among themselves, read at once."""

Handler = Callable[[Request, Asked], Response | Later]
Heard = Callable[[Request, Beat | None], None]


@dataclass(frozen=True)
class Desk:
    """What the routes need of a coordinator."""

    run: str
    office: Office
    spool: Spool
    states: StateFiles
    journal: Journal
    root: Path
    """Where the journal's files are."""

    info: Callable[[], Answer]
    max_body_bytes: Callable[[], int]
    max_request_bytes: int
    """What one request may bring at the most."""

    failing: Callable[[str], None]
    """Told why the disk takes nothing, and an empty sentence when it does again."""

    heard: Heard
    """Told of every call that may carry a beat: who is at the other end."""

    unproven: Callable[[Request, str], None]
    """Called with a request whose proof is not that of the island that it names."""


class Routes:
    """Answers what islands ask."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._small_bodies: dict[tuple[str, int], np.ndarray] = {}
        self._first = FirstWeights(desk.office, desk.root)
        self._uploads = StateUploads(desk.office, desk.spool)
        self._large = ThreadPoolExecutor(1, thread_name_prefix="atoll-large")
        self._reductions = threading.BoundedSemaphore(REDUCTIONS)
        self._join_limits = JoinLimits()
        self._own: Mapping[str, Handler] = {
            "info": self._info,
            "join": self._join,
            "join_unnamed": self._join,
            "heartbeat": self._heartbeat,
            "publish": self._publish,
            "agreed": self._agreed,
            "outcome": self._outcome,
            "state": self._state,
            "constants": self._constants,
            "constant": self._constant,
            "keep": self._keep,
            "found": self._found,
            "recover": self._recover,
        }

    def handle(self, request: Request) -> Response | Later:
        """Return the answer to a request of an island."""
        try:
            known = asked(request.method, request.target, request.headers)
            if known is None:
                return as_response(nowhere_parts(request.target))
            require_run(request.headers, self._desk.run)
            self._require_proof(request, known)
            return self._own.get(known.route.name, self._small)(request, known)
        except (AtollError, RunEnded) as exc:
            return as_response(error_parts(exc))

    def _require_proof(self, request: Request, known: Asked) -> None:
        """Return when a request may speak for the island that it names, if any.

        Raises:
            LeaseLost: the run does not know this life, so it cannot judge the proof:
                an honest island joins again.
            Refused: the proof is not that of the island's key.
        """
        claim = known.claim
        if claim is None:
            return
        state, _ = self._desk.office.look()
        require_here(state)
        island, incarnation = claim.identity.island, claim.identity.incarnation
        member = state.members.require_life(island, incarnation)
        key, run = member.key, self._desk.run
        proof = island_proof(key, run=run, island=island, incarnation=incarnation)
        if hmac.compare_digest(proof, claim.proof):
            return
        self._desk.unproven(request, island)
        raise Refused(
            f"The {PROOF_HEADER} of this call is not that of incarnation {incarnation} "
            f"of island {island!r}: its key is another. An island speaks only for "
            "itself. Join with the island's key, or under another name."
        )

    def _small(self, request: Request, known: Asked) -> Response:
        """Answer a call whose body is read whole."""
        return self._with_call(request, known, self._desk.office.ask)

    def _info(self, request: Request, known: Asked) -> Response:
        return as_response(self._desk.info())

    def _join(self, request: Request, known: Asked) -> Response:
        _, now_s = self._desk.office.look()
        self._join_limits.require(origin_of(request.address[0]), now_s=now_s)

        def join(call: Call) -> Reply:
            assert isinstance(call, JoinCall)
            self._require_foundable(call)
            return self._first.join(call)

        return self._with_call(request, known, join)

    def _require_foundable(self, call: JoinCall) -> None:
        """Refuse a model that is to found the run, and could not."""
        state, _ = self._desk.office.look()
        if state.model is None and not self._first.is_awaited:
            require_foundable(
                call.request.model,
                state.settings,
                room=self._desk.journal.room,
                most_bytes=self._desk.max_request_bytes,
            )

    def _heartbeat(self, request: Request, known: Asked) -> Response:
        def beat(call: Call) -> Reply:
            assert isinstance(call, HeartbeatCall)
            reply = self._desk.office.ask(call)
            self._desk.heard(request, call.beat)
            return reply

        return self._with_call(request, known, beat)

    def _publish(self, request: Request, known: Asked) -> Response:
        """Judge the header, then take the body straight to the spool."""
        desk, incoming = self._desk, self._incoming(request.body)
        most = desk.office.change_by(
            lambda service, now_s: service.header_bytes(known.fragment)
        )
        upload = parse_upload(known, incoming, max_header_bytes=most)
        header = upload.header
        reception = desk.office.offer(header, upload.beat)
        desk.heard(request, upload.beat)
        if reception is Reception.WANTED:
            incoming.expect(header)
            check = desk.office.check_of(header)
            with self._telling_of_the_disk():
                frame = desk.spool.take(header, request.body.readinto, check)
            reception = desk.office.take(frame)
        return as_response(reply_parts(reception))

    def _agreed(self, request: Request, known: Asked) -> Response:
        """Read what islands have reduced, and no more than the round has."""
        office, length = self._desk.office, request.body.length_bytes
        most = office.change_by(
            lambda service, now_s: service.agreed_bytes(known.fragment)
        )
        if length > most:
            raise Refused(
                f"{length} bytes cannot be an outcome of fragment {known.fragment}, "
                f"which takes {most} with its updates' headers. Bring one round's."
            )
        if not self._reductions.acquire(blocking=False):
            raise Unreachable(
                f"Outcomes of collectives are already being read (limit {REDUCTIONS}). "
                "Ask again."
            )
        try:
            call = parse_call(known, self._incoming(request.body))
            assert isinstance(call, AgreedCall)
            return as_response(reply_parts(office.gather(call)))
        finally:
            self._reductions.release()

    def _outcome(self, request: Request, known: Asked) -> Later:
        """Answer when there is something to say; nobody's thread waits for it."""
        call = parse_call(known, self._incoming(request.body))
        assert isinstance(call, OutcomeCall)
        later = Later(
            wait_s=4 * LONG_POLL_S, default=lambda: as_response(reply_parts(None))
        )

        def answer(reply: Reply | Exception) -> None:
            try:
                later.set(self._outcome_response(request, reply))
            except AtollError as exc:  # what lies on the disk is damaged
                later.set(as_response(error_parts(exc)))

        office, short = self._desk.office, replace(call, has_body=False)
        later.on_gone(partial(office.forget, later))
        origin = request.connection.origin
        if office.put(short, answer, ticket=later, origin=origin):
            self._desk.heard(request, call.beat)
        return later

    def _outcome_response(self, request: Request, reply: Reply | Exception) -> Response:
        if isinstance(reply, Exception):
            return as_response(error_parts(reply))
        answer = reply_parts(reply)
        if not isinstance(reply, Outcome):
            return as_response(answer)
        header = reply.agreed.header
        stored = self._desk.journal.body(header.fragment, header.round)
        if stored is None:
            return as_response(answer)
        packed_bytes = len(answer.body[0])
        # A large body has a file of its own, which begins with the header; a small one
        # lies among others, by chance as far from their first byte as a header is long.
        if not is_large(header) or len(answer.body) > 1:
            return as_response(_with_body(answer, self._body(stored)))
        file = FilePart(
            file=self._desk.root / stored.name,
            length=packed_bytes + header.body_bytes,
        )
        return ranged(request, file, headers=_framed(answer))

    def _body(self, stored: StoredBody) -> np.ndarray:
        """Return a body; a small one is read once, though every island takes it."""
        key = stored.name, stored.first
        body = self._small_bodies.get(key)
        if body is None:
            body = stored.read()
            if len(body) <= SMALL_BYTES:
                self._small_bodies[key] = body
                if len(self._small_bodies) > KEPT_BODIES:
                    del self._small_bodies[next(iter(self._small_bodies))]
        return body

    def _state(self, request: Request, known: Asked) -> Response:
        require_here(self._desk.office.look()[0])
        file = self._desk.states.newest(known.fragment)
        part = FilePart(file=file.handle, length=file.size_bytes)
        said = {"Content-Type": Takes.FRAME.value}
        said |= receipt_headers(state=file.receipt)
        response = ranged(request, part, etag=file.digest, headers=said)
        return replace(response, done=partial(_keep, file))

    def _constants(self, request: Request, known: Asked) -> Response:
        require_here(self._desk.office.look()[0])
        found = self._desk.office.change_by(lambda service, _: service.catalogue)
        return as_response(catalogue_parts(found))

    def _constant(self, request: Request, known: Asked) -> Response:
        """Send a constant from its file, which never changes."""
        state, _ = self._desk.office.look()
        require_here(state)
        constants = self._desk.journal.constants
        found = keepable(state.model).get(known.digest) if state.model else None
        if found is None or not has(constants.kept, found):
            raise Refused(
                f"The run keeps no constant with the digest {known.digest[:12]}. "
                "GET /constants lists those that it keeps."
            )
        if not bytes_of(found):
            return ranged(request, b"", etag=found.digest)
        file = self._desk.root / name_of(found.digest)
        part = FilePart(file=file, length=bytes_of(found))
        return ranged(request, part, etag=found.digest)

    def _keep(self, request: Request, known: Asked) -> Response:
        """Judge who brings what, then read a part of it."""
        who = known.island, known.incarnation, known.digest
        self._desk.office.change_by(
            lambda service, now_s: service.awaited_constant(*who)
        )
        return self._small(request, known)

    def _found(self, request: Request, known: Asked) -> Response:
        incoming = self._states_of(request, known)
        with self._telling_of_the_disk():
            call = self._uploads.founding(known, incoming, request.body.readinto)
        return as_response(reply_parts(self._desk.office.ask(call)))

    def _recover(self, request: Request, known: Asked) -> Response:
        incoming = self._states_of(request, known)
        with self._telling_of_the_disk():
            call = self._uploads.recovery(known, incoming, request.body.readinto)
        return as_response(reply_parts(self._desk.office.ask(call)))

    def _states_of(self, request: Request, known: Asked) -> Incoming:
        """Return the body's reader, if this island may send states of this size."""
        who = known.island, known.incarnation
        most = self._desk.office.change_by(
            lambda service, now_s: service.states_bytes(*who)
        )
        if request.body.length_bytes > most + STATES_HEADERS_BYTES:
            raise Refused(
                f"{request.body.length_bytes} bytes cannot be states of the run's "
                f"model, which take {most}. Bring one for each fragment."
            )
        return self._incoming(request.body)

    @contextmanager
    def _telling_of_the_disk(self) -> Iterator[None]:
        """Tell people when the disk takes nothing, and when it does again."""
        try:
            yield
        except DiskError as exc:
            self._desk.failing(str(exc))
            raise
        self._desk.failing("")

    def _with_call(
        self, request: Request, known: Asked, answer: Callable[[Call], Reply]
    ) -> Response:
        """Answer a call whose body is read whole.

        A document takes many times its size in memory while it is parsed. Those that
        are large are parsed and answered by one thread: what one has used, the next
        uses again.
        """
        size = request.body.length_bytes
        is_large = SMALL_BYTES < size <= MAX_LARGE_BYTES
        if known.route.takes is not Takes.JSON or not is_large:
            call = parse_call(known, self._incoming(request.body))
            return as_response(reply_parts(answer(call)))
        data = self._desk.spool.take_bytes(size, request.body.readinto)
        reply = self._large.submit(
            lambda: answer(parse_call(known, Incoming.of(data)))
        ).result()
        return as_response(reply_parts(reply))

    def _incoming(self, body: Body) -> Incoming:
        def read(size: int) -> memoryview:
            if size > MOVED_BYTES:
                return self._desk.spool.take_bytes(size, body.readinto)
            # Not a bytearray: only what has arrived is to be resident.
            part = np.empty(size, np.uint8).data
            body.readinto(part)
            return part

        return Incoming(
            read, body.length_bytes, max_body_bytes=self._desk.max_body_bytes()
        )


def as_response(answer: Answer) -> Response:
    """Return an answer as it is sent."""
    views = [view_of(part) for part in answer.body]
    return Response(status=answer.status, headers=answer.headers, body=views)


def _with_body(answer: Answer, body: object) -> Answer:
    header, *rest = answer.body
    return replace(answer, headers=_framed(answer), body=(header, body, *rest))  # type: ignore[arg-type]


def _framed(answer: Answer) -> dict[str, str]:
    return {**answer.headers, "Content-Type": Takes.FRAME.value}


def _keep(file: object) -> None:
    """Hold a file until it has been sent: its handle is closed with its last owner."""
