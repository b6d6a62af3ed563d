"""Calls, replies and errors are the same after a trip over HTTP."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import errors
from atoll.errors import (
    AtollError,
    CorruptError,
    NameKnown,
    NonFinite,
    NoRows,
    NoSuchObject,
    Refused,
    RunEnded,
    StoreDenied,
    Unreachable,
    UsageError,
)
from atoll.exchange import Frame, Outcome
from atoll.exchange.api import (
    FAILURES,
    MAX_BEAT_BYTES,
    EncodedReply,
    Failure,
    Incoming,
    apart,
    error_parts,
    messages,
    not_found_reply,
    parse_upload,
    reply_parts,
    require_run,
    to_request,
)
from atoll.exchange.api.bodies import require_table
from atoll.exchange.calls import (
    Call,
    HeartbeatCall,
    LeaveCall,
    OutcomeCall,
    PublishCall,
    Reply,
    StateCall,
)
from atoll.protocol import HeldRound, Position
from atoll.routes import UNLISTED, find_route, methods_of
from tests.exchange.api_samples import (
    AGREED,
    BEAT,
    CALLS,
    JOIN,
    POSITION,
    QUESTION,
    REPLIES,
    REPLY,
    answered,
    as_received,
    body_bytes,
    frame_of,
    head_of,
    plain,
    proof_of,
    raised_and_read,
    replied_and_read,
    sent_and_read,
)
from tests.wire.samples import an_update

MANY = replace(BEAT, holds=(HeldRound(7, bytes(16)),) * 1000)
"""A beat of a thousand fragments: each takes 38 bytes and more."""


def all_errors(kind: type[AtollError] = AtollError) -> set[type[AtollError]]:
    """Return every error of the tree."""
    found = {kind}
    for each in kind.__subclasses__():
        found |= all_errors(each)
    return {each for each in found if each.__module__ == errors.__name__}


@settings(deadline=None)
@given(call=CALLS)
def test_a_call_arrives_as_it_was_made(call: Call) -> None:
    """What the coordinator reads is the call, to the bit."""
    assert plain(sent_and_read(call)) == plain(call)


@settings(deadline=None)
@given(exchange=REPLIES)
def test_a_reply_arrives_as_it_was_made(exchange: tuple[Call, Reply]) -> None:
    """What the island reads is the reply, to the bit."""
    call, reply = exchange

    assert plain(replied_and_read(call, reply)) == plain(reply)


def extra_of(failure: Failure, number: int) -> dict[str, Any]:
    """Return what an error has beside its message."""
    value = f"s3://lagoon/{number}" if failure.extra == "target" else number
    return {failure.extra: value} if failure.extra else {}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: each.code)
@given(
    message=st.text(st.characters(codec="utf-8"), max_size=200),
    number=st.integers(0, 2**64 - 1),
)
def test_an_error_arrives_as_it_was_raised(
    failure: Failure, message: str, number: int
) -> None:
    """The island raises the same class, with the same words and attributes."""
    extra = extra_of(failure, number)
    error = failure.kind(message, **extra)

    found = raised_and_read(error)

    assert type(found) is type(error)
    assert str(found) == message
    assert vars(found) == extra


def test_every_error_of_the_tree_has_a_form() -> None:
    """No error of ours travels as another one."""
    kinds = [each.kind for each in FAILURES]
    of_others = {NoSuchObject, StoreDenied, NoRows}  # of a bucket, and of an island

    assert set(kinds) == (all_errors() - of_others) | {RunEnded}
    assert len({each.code for each in FAILURES}) == len(FAILURES)
    assert isinstance(raised_and_read(NameKnown("x", incarnation=3)), Refused)
    assert isinstance(raised_and_read(NonFinite("x", index=3)), UsageError)


def test_an_error_that_nobody_meant_says_nothing_of_the_inside() -> None:
    """A stray exception is a fault: unreachable at the island, without its words."""
    answer = error_parts(KeyError("/home/secret"))

    assert answer.status == 500
    assert b"secret" not in body_bytes(answer)
    assert type(raised_and_read(KeyError("/home/secret"))) is Unreachable


def test_a_long_message_is_cut() -> None:
    """An error's message fits its form, whatever it repeats."""
    found = raised_and_read(UsageError("ä" * 9000))

    # 8192 bytes less three for the dots: 4094 letters of two bytes.
    assert str(found) == "ä" * 4094 + "..."


def test_what_may_be_repeated_says_when() -> None:
    """A coordinator that cannot answer now says so to everybody in between."""
    for failure in FAILURES:
        error = failure.kind("x", **extra_of(failure, 1))
        answer = error_parts(error)
        assert answer.status == failure.status
        assert ("Retry-After" in answer.headers) == (failure.status >= 500)


def test_a_frame_is_sent_without_a_copy() -> None:
    """The body of an update, and of a reply, is the island's own memory."""
    frame = frame_of(an_update())
    for message in (to_request(PublishCall(frame)), reply_parts(frame)):
        _, body = message.body
        assert np.shares_memory(np.frombuffer(body, np.uint8), frame.body)
        assert message.body_bytes == len(body_bytes(message))


def test_a_key_is_in_the_body_alone() -> None:
    """Neither target nor header shows an island's key or nonce."""
    sent = to_request(JOIN, run="lagoon")

    head = f"{sent.target} {sent.headers}"
    assert b'"6b6579"' in body_bytes(sent)
    assert "6b6579" not in head
    assert "6e6f6e6365" not in head


def test_the_run_may_give_the_name() -> None:
    """Joining without a name goes to a path that no name can have."""
    unnamed = replace(JOIN, request=replace(JOIN.request, island=None))
    dash = replace(JOIN, request=replace(JOIN.request, island="-"))

    assert to_request(unnamed).target == "/islands"
    assert to_request(dash).target == "/islands/-"


@pytest.mark.parametrize("name", ["a/b", "..", "", "\ud800", "a" * 129])
def test_a_name_that_no_path_can_carry_is_refused_before_it_is_sent(name: str) -> None:
    """An island learns at once that its name is none."""
    call = replace(JOIN, request=replace(JOIN.request, island=name))
    with pytest.raises(UsageError, match="island"):
        to_request(call)


@pytest.mark.parametrize(
    "call",
    [PublishCall(frame_of(an_update()), MANY), OutcomeCall(2, 7, 2.0, MANY)],
    ids=["publish", "outcome"],
)
def test_a_large_beat_goes_ahead(call: PublishCall | OutcomeCall) -> None:
    """A beat above the limit of a header is a heartbeat of its own, and fits there."""
    with pytest.raises(UsageError, match=f"above the limit of {MAX_BEAT_BYTES}"):
        to_request(call)

    ahead, rest = apart(call)

    assert ahead == HeartbeatCall(MANY)
    assert sent_and_read(ahead) == ahead
    assert plain(sent_and_read(rest)) == plain(replace(call, beat=None))


@pytest.mark.parametrize("call", [QUESTION, LeaveCall("a", 1), StateCall(0)])
def test_a_small_beat_rides(call: Call) -> None:
    """Nothing goes ahead of a call whose beat fits."""
    assert apart(call) == (None, call)


def test_a_beat_of_the_most_fragments_is_a_heartbeat() -> None:
    """A run with as many fragments as there can be still hears its islands."""
    call = HeartbeatCall(replace(BEAT, holds=(HeldRound(9999, bytes(16)),) * 65_535))

    assert sent_and_read(call) == call


def test_a_large_position_follows_its_frame() -> None:
    """An outcome of a run with very many fragments still says where the run is."""
    position = Position(step=1, rounds=(10_000,) * 5000)
    outcome = Outcome(AGREED, position)
    answer = reply_parts(outcome)

    assert "Atoll-Position" not in answer.headers
    assert plain(answered(QUESTION, answer)) == plain(outcome)


@pytest.mark.parametrize("said", [{}, {"decay_round": 9, "end_tokens": 10**12}])
def test_what_is_not_set_is_not_said(said: dict[str, int]) -> None:
    """A position without a decay is the one that older islands read."""
    position = replace(POSITION, **said)  # type: ignore[arg-type]  # by name
    form = require_table(messages.POSITION.write(position), "position")

    assert {"decay_round", "end_tokens"} & form.keys() == said.keys()
    assert messages.POSITION.read(form, "position") == position


def test_an_outcome_that_is_kept_no_more_is_its_header() -> None:
    """Without its body, an outcome is still a roster."""
    empty = Frame(AGREED.header, np.empty(0, np.uint8))
    answer = reply_parts(Outcome(empty, POSITION))
    found = answered(QUESTION, answer)

    assert answer.headers["Content-Type"] == "application/vnd.atoll.header"
    assert isinstance(found, Outcome)
    assert not found.has_body


def test_an_upload_is_judged_by_its_header() -> None:
    """The header and the beat are known before a byte of the body is read."""
    frame = frame_of(an_update())
    call = PublishCall(frame, BEAT)
    sent = to_request(call, proof=proof_of(call))
    head = head_of(sent.method, sent.target, as_received(sent.headers))
    stream = BytesIO(body_bytes(sent))
    body = Incoming(stream.read, sent.body_bytes)

    upload = parse_upload(head, body)

    assert (upload.header, upload.beat) == (frame.header, BEAT)
    assert body.left_bytes == frame.header.body_bytes
    call = upload.call(body.body(upload.header))
    assert plain(call) == plain(PublishCall(frame, BEAT))


def test_frames_from_a_stream_are_separate_buffers() -> None:
    """A body that comes from a stream is not held together with its header."""
    answer = reply_parts(AGREED)
    stream = BytesIO(body_bytes(answer))

    frame = Incoming(stream.read, answer.body_bytes).frame()

    assert plain(frame) == plain(AGREED)


def test_a_frame_has_a_tag() -> None:
    """Half a frame may be fetched again: its tag says whether it is the same one."""
    first, second = frame_of(an_update()), frame_of(an_update(round=8))
    tags = [reply_parts(each).headers["ETag"] for each in (first, first, second)]

    assert tags[0] == tags[1] != tags[2]
    assert re.fullmatch('"[0-9a-f]{64}"', tags[0])


def headers_of(call: Call, **changes: str) -> dict[str, str]:
    """Return the headers of a call as they are received, with changes."""
    return as_received(to_request(call, run="lagoon é").headers) | changes


@pytest.mark.parametrize("said", ["1", "", "3", "2.0", "02"])
def test_another_protocol_is_refused(said: str) -> None:
    """A caller of another version is told so, with both numbers."""
    headers = headers_of(StateCall(0), **{"atoll-protocol": said})
    with pytest.raises(UsageError, match=f"protocol '{said}', and this coordinator 2"):
        head_of("GET", "/state/0", headers)


def test_another_run_is_not_lost_work() -> None:
    """A call for another run is unreachable there, so that its island asks again."""
    headers = headers_of(StateCall(0))

    require_run(headers, "lagoon é")
    require_run({}, "lagoon é")
    with pytest.raises(Unreachable, match=r"for run 'lagoon é', .* has run 'reef'"):
        require_run(headers, "reef")


def test_a_path_that_is_not_there_is_said_to_be_none() -> None:
    """Unknown paths and methods are told apart, and answered in our form."""
    assert find_route("GET", ("nowhere",)).route is UNLISTED
    assert find_route("PUT", ("state", "0")).route is UNLISTED
    assert methods_of(("state", "0")) == ("GET", "POST")
    assert not_found_reply(("nowhere",)).status == 404
    wrong = not_found_reply(("state", "0"))
    assert (wrong.status, wrong.headers["Allow"]) == (405, "GET, POST")


@pytest.mark.parametrize("status", [301, 400, 403, 404, 500, 502, 504])
@pytest.mark.parametrize("kind", ["text/html", "application/json"])
def test_an_answer_of_a_stranger_is_unreachable(status: int, kind: str) -> None:
    """What does not speak our form is not the coordinator: ask again."""
    answer = EncodedReply(status, {"Content-Type": kind}, (b"<html>no</html>",))
    with pytest.raises(Unreachable, match=f"Status {status} came back"):
        answered(StateCall(0), answer)


def test_a_page_instead_of_an_answer_is_unreachable() -> None:
    """A status that looks right does not make a page an answer."""
    with pytest.raises(Unreachable, match="'text/html' came back"):
        answered(
            QUESTION, EncodedReply(200, {"Content-Type": "text/html"}, (b"hello",))
        )


@pytest.mark.parametrize(("status", "kind"), [(503, Unreachable), (409, Refused)])
def test_an_unknown_error_is_known_by_its_status(
    status: int, kind: type[Exception]
) -> None:
    """An error of a later release is raised as what its status says."""
    body = b'{"error":"tired","message":"Not today."}'
    with pytest.raises(kind, match="Not today") as caught:
        answered(
            QUESTION,
            EncodedReply(status, {"Content-Type": "application/json"}, (body,)),
        )

    assert type(caught.value) is kind


def test_the_error_decides_and_not_the_status() -> None:
    """A coordinator may choose another status, and the island raises the same."""
    answer = error_parts(Refused("No token."))
    with pytest.raises(Refused, match="No token"):
        answered(QUESTION, replace(answer, status=401))


@pytest.mark.parametrize("window", [0, 1, 100])
def test_a_window_is_in_the_reply_to_a_join(window: int) -> None:
    """An island learns its window when it joins; without one the form is as before."""
    reply = replace(REPLY, window=window)
    form = json.loads(body_bytes(reply_parts(reply)))

    assert replied_and_read(JOIN, reply) == reply
    assert form.get("window", 0) == window
    assert ("window" in form) == bool(window)


def test_a_wrong_answer_is_corrupt() -> None:
    """A reply in our form that breaks its rules names the field."""
    body = (
        b'{"step":-1,"rounds":[],"last_round":null,"tokens":0,"wanted":[],"lost":[],'
        b'"saves":0}'
    )
    answer = EncodedReply(200, {"Content-Type": "application/json"}, (body,))
    with pytest.raises(CorruptError, match=r"position\.step=-1 must be a whole number"):
        answered(HeartbeatCall(BEAT), answer)


def test_a_header_for_another_path_is_refused() -> None:
    """What a path says and what its frame says must be the same."""
    call = PublishCall(frame_of(an_update(island="osaka")))
    sent = to_request(call, proof=proof_of(call))
    for said, other, message in (
        ("osaka", "kyoto", "island='osaka' in the body is not 'kyoto'"),
        ("rounds/7", "rounds/8", "round=7 in the body is not 8"),
        ("fragments/2", "fragments/3", "fragment=2 in the body is not 3"),
    ):
        target = sent.target.replace(said, other)
        head = head_of(sent.method, target, as_received(sent.headers))
        with pytest.raises(UsageError, match=message):
            parse_upload(head, Incoming.of(body_bytes(sent)))


def test_a_beat_of_another_island_does_not_ride() -> None:
    """Only an island's own beat comes with its update."""
    stranger = replace(BEAT, island="osaka")
    sent = to_request(PublishCall(frame_of(an_update()), stranger))
    head = head_of(sent.method, sent.target, as_received(sent.headers))
    with pytest.raises(UsageError, match="'osaka' in the body is not 'tokyo-1'"):
        parse_upload(head, Incoming.of(body_bytes(sent)))
