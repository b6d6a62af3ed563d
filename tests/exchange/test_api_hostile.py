"""Hostile HTTP: any input gives only our errors, and reserves no memory.

The one exception is RunEnded, which a coordinator may say at any time.
"""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import AtollError, CorruptError, RunEnded, UsageError
from atoll.exchange.api import (
    MAX_LARGE_BYTES,
    Incoming,
    info_parts,
    parse_call,
    parse_info,
    parse_reply,
    reply_parts,
    to_request,
)
from atoll.exchange.api.bodies import load
from atoll.exchange.api.messages import POSITION as POSITION_FORM
from atoll.exchange.calls import (
    Call,
    FoundCall,
    HeartbeatCall,
    PublishCall,
    RecoverCall,
    StateCall,
)
from atoll.http import Problem
from atoll.routes import ROUTES, BodyKind
from atoll.wire import MAX_HEADER_BYTES
from tests.exchange.api_samples import (
    AGREED,
    BEAT,
    JOIN,
    POSITION,
    QUESTION,
    REPLY,
    RUN,
    as_received,
    body_bytes,
    frame_of,
    head_of,
    proof_of,
)
from tests.wire.samples import a_state, an_update

HEADERS = {"atoll-protocol": "2", "content-type": "application/json"}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-1, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["", "ff", "run", "\ud800", "a/b", "..", "x" * 600, "1e999"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
JOIN_FORM = json.loads(body_bytes(to_request(JOIN)))
INFO = json.loads(body_bytes(info_parts(RUN)))
JOINED = json.loads(body_bytes(reply_parts(REPLY)))
BEAT_FORM = json.loads(body_bytes(to_request(HeartbeatCall(BEAT))))


def join(data: bytes) -> Call:
    """Read a joining as a coordinator does."""
    head = head_of("POST", "/islands/tokyo-1", HEADERS)
    return parse_call(head, Incoming.of(data))


def heartbeat(data: bytes) -> Call:
    """Read a heartbeat as a coordinator does."""
    headers = HEADERS | {"atoll-island-proof": proof_of(HeartbeatCall(BEAT)) or ""}
    head = head_of("POST", "/islands/tokyo-1/heartbeat", headers)
    return parse_call(head, Incoming.of(data))


def get(target: str) -> Call:
    """Read a request without a body as a coordinator does."""
    head = head_of("GET", target, HEADERS)
    return parse_call(head, Incoming.of(b""))


def reply_to(call: Call, data: bytes, status: int = 200) -> object:
    """Read an answer as an island does."""
    return parse_reply(call, status, HEADERS, Incoming.of(data))


READERS: dict[str, tuple[Any, Any]] = {
    "join": (join, JOIN_FORM),
    "heartbeat": (heartbeat, BEAT_FORM),
    "position": (
        lambda data: reply_to(HeartbeatCall(BEAT), data),
        POSITION_FORM.write(POSITION),
    ),
    "joined": (lambda data: reply_to(JOIN, data), JOINED),
    "reception": (
        lambda data: reply_to(PublishCall(AGREED), data),
        {"reception": "staged"},
    ),
    "error": (
        lambda data: reply_to(QUESTION, data, 409),
        {"error": "name_known", "message": "x", "incarnation": 2},
    ),
    "info": (parse_info, INFO),
}


def places_of(value: Any) -> Iterator[list[Any]]:
    """Yield the way to every value inside a form."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inside:
        yield [key]
        if isinstance(each, dict | list):
            for way in places_of(each):
                yield [key, *way]


def changed(value: Any, way: list[Any], new: Any) -> Any:
    """Return a form with another value at one place."""
    copy = json.loads(json.dumps(value))
    inside = copy
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = new
    return copy


def only_ours(read: Any, data: bytes) -> None:
    """Hold that bytes are taken, or refused by an error of ours."""
    with suppress(AtollError, RunEnded):
        read(data)


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
@pytest.mark.parametrize("name", sorted(READERS))
@settings(deadline=None)
@given(data=st.data())
def test_a_form_with_any_value_anywhere_is_taken_or_refused(
    name: str, data: st.DataObject
) -> None:
    """No value in any field raises anything but an error of ours."""
    read, form = READERS[name]
    way = data.draw(st.sampled_from(list(places_of(form))))
    mutated = changed(form, way, data.draw(VALUES))
    only_ours(read, json.dumps(mutated).encode())


@pytest.mark.parametrize("name", sorted(READERS))
@settings(deadline=None)
@given(data=st.binary(max_size=200) | VALUES.map(lambda v: json.dumps(v).encode()))
def test_any_bytes_are_refused(name: str, data: bytes) -> None:
    """Noise, and JSON of another form, raises an error of ours."""
    read, _ = READERS[name]
    with pytest.raises((AtollError, RunEnded)):
        read(data)


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_field_more_or_less_is_refused(name: str) -> None:
    """A form has exactly its fields: one that is missing or unknown is refused."""
    read, form = READERS[name]
    for key in form.keys() - {"step_s"}:  # optional
        rest = {each: value for each, value in form.items() if each != key}
        with pytest.raises((AtollError, RunEnded)):
            read(json.dumps(rest).encode())
    with pytest.raises(AtollError):
        read(json.dumps(form | {"further": 1}).encode())


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (["key"], "abc", r"join\.key='<not shown>' must be 1 to 64 bytes in lower"),
        (["key"], "AB", r"join\.key='<not shown>'"),
        (["key"], "", r"join\.key='<not shown>'"),
        (["nonce"], "ab" * 65, r"join\.nonce='<not shown>'"),
        (["incarnation"], True, r"join\.incarnation=True must be a whole number"),
        (["after"], 1.0, r"join\.after=1\.0 must be a whole number"),
        (["after"], 2**64, r"join\.after=18446744073709551616 must be .* to 1844674"),
        (["after"], 10**400, r"join\.after=<an integer of 1329 bits>"),
        (["after"], None, r"join\.after=None must be a whole number"),
        (["model"], {}, r"join\.model=\{\} must be a list"),
        (["model"], [[]], r"join\.model\[0\] has 0 entries; it must have 5 to 5"),
        (["model", 0, 0], "", r"join\.model\[0\]\.name='' must be 1 to 512 bytes"),
        (["model", 0, 0], "\ud800", r"model\[0\]\.name=.* without surrogates"),
        (["model", 0, 0], "mask", r"join\.model names 'mask' twice"),
        (["model", 0, 1], [-1], r"model\[0\]\.shape\[0\]=-1 must be a whole"),
        (["model", 0, 1], [1] * 65, r"shape has 65 entries; it must have 0 to 64"),
        (["model", 0, 3], "expert", r"role='expert' must be one of parameter"),
        (["model", 1, 4], "0", r"digest='0' must be 0 to 64 bytes in lower-case"),
    ],
)
def test_a_wrong_field_of_a_joining_is_named(
    way: list[Any], value: object, message: str
) -> None:
    """The message has the field, its value and what it must be, and no secret."""
    with pytest.raises(UsageError, match=message):
        join(json.dumps(changed(JOIN_FORM, way, value)).encode())


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (["island"], "osaka", "island='osaka' in the body is not 'tokyo-1'"),
        (["island"], "a/b", r"beat\.island='a/b' must not contain '/'"),
        (["island"], "n" * 999, r"beat\.island='nnn.*' must be a name of at most 128"),
        (["holds", 1, 1], "00", r"beat\.holds\[1\]\.digest='00' must be 16 to 16"),
        (["waits_for"], [1], r"beat\.waits_for has 1 entries; it must have 2 to 2"),
        (["step_s"], 0, r"beat\.step_s=0 must be a finite number above 0\.0 and at"),
        (["step_s"], -0.1, r"beat\.step_s=-0\.1 must be a finite number above 0\.0"),
        (["step_s"], 2**40 + 1, r"step_s=1099511627777 must be .* at most 10995116277"),
        (["step_s"], None, r"beat\.step_s=None must be a finite number above 0\.0"),
        (["step_s"], math.nan, "NaN is no number of JSON"),
    ],
)
def test_a_wrong_field_of_a_heartbeat_is_named(
    way: list[Any], value: object, message: str
) -> None:
    """The field is named from the outside in."""
    with pytest.raises(UsageError, match=message):
        heartbeat(json.dumps(changed(BEAT_FORM, way, value)).encode())


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (0, r"window=0 must be a whole number from 1 to 2147483647"),
        (2**31, r"window=2147483648 must be a whole number from 1 to 2147483647"),
        (101, r"window=101 must be at most sync\.sync_every=100"),
        (None, r"window=None must be a whole number from 1"),
    ],
)
def test_a_window_that_no_island_has_is_refused(window: object, message: str) -> None:
    """A join reply gives 1 to sync_every inner steps per window, or says nothing."""
    with pytest.raises(CorruptError, match=message):
        reply_to(JOIN, json.dumps(JOINED | {"window": window}).encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no JSON: Expecting value at character 0"),
        (b"\xff\xfe{}", "no JSON that can be read"),
        (b"\xef\xbb\xbf{}", "no JSON: Unexpected UTF-8 BOM"),
        (b'{"a":1,"a":2}', "key 'a' is in one table twice"),
        (b"[NaN]", "NaN is no number of JSON"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b"1" * 5000, "no JSON that can be read"),
        (b"[" * 9 + b"]" * 9, "nested 9 deep, above the limit of 8"),
        (b"[" * 2**20, r"has 1048576 lists and tables, above the limit of 262144"),
        (b"1," * (2**20 + 1), "has 1048577 commas, above the limit of 1048576"),
        (b'["' + b'\\"' * 2**20, "no JSON: Unterminated string"),
        (b'"' * (2**20 + 1), "no JSON: Extra data at character 2"),
        (b'"[[[[[[[[[[[["', "must be a table"),
        (b" " * (MAX_LARGE_BYTES + 1), "has 8388609 bytes, above the limit of 8388608"),
    ],
)
def test_json_is_judged_before_it_is_parsed(data: bytes, message: str) -> None:
    """Size, depth, repeated keys and odd numbers are refused, each with its reason."""
    with pytest.raises(UsageError, match=message):
        join(data)


def test_text_is_never_repeated_in_a_message() -> None:
    """JSON that breaks off may hold a key, so its message shows none of it."""
    with pytest.raises(UsageError) as caught:
        join(b'{"key": "5ec3e7", "nonce": ')

    assert "5ec3e7" not in str(caught.value)


def test_brackets_inside_text_are_no_nesting() -> None:
    """Depth counts lists and tables, not what a name says."""
    assert load(b'["[[[[[[[[[[", "\\"[[[[[[[[[["]', name="x") == [
        "[" * 10,
        '"' + "[" * 10,
    ]


@settings(deadline=None)
@given(target=st.text(max_size=60) | st.text("/%2eE.?&=islandsinfo", max_size=60))
def test_any_target_is_known_or_refused(target: str) -> None:
    """A target leads to a route, to none, or is refused by an error of ours."""
    for path in (target, "/" + target, f"/islands/{target}", f"/state/{target}"):
        for route in ROUTES:
            try:
                head = head_of(
                    route.method, path, HEADERS | {"content-type": route.body}
                )
                if head.route.is_call and head.route.body is BodyKind.EMPTY:
                    parse_call(head, Incoming.of(b""))
            except (AtollError, Problem):
                continue
            except AssertionError:
                assert head.route.name in ("constants", "constant")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("state/0", "must be a path that starts with '/'"),
        ("http://elsewhere/state/0", "must be a path that starts with '/'"),
        ("/state/0" + "?" * 2048, "target has 2056 bytes; 2048 are allowed"),
        ("/state/é", "fragment='é' must be a whole number"),
        ("/state/%zz", "'%' is not followed by two hex digits"),
        ("/state/%ff", "is not UTF-8"),
        ("/state/01", "fragment='01' must be a whole number"),
        ("/state/+1", "must be a whole number"),
        ("/state/4294967296", "from 0 to 4294967295, in decimal"),
        ("/state/-1", "must be a whole number"),
        ("/state/٣", "fragment='٣' must be a whole number"),
        ("/state/%D9%A3", "fragment='٣' must be a whole number"),
        ("/state/0?x=1", "'x' is unknown in this query"),
        ("/fragments/0/rounds/1/outcome?wait_s=1&wait_s=2", "'wait_s' twice"),
        ("/fragments/0/rounds/1/outcome?wait_s", "wait_s='' must be a number of"),
        ("/fragments/0/rounds/1/outcome?wait_s=61", r"from 0 to 60\.0"),
        ("/fragments/0/rounds/1/outcome?wait_s=nan", r"wait_s='nan' must be"),
        ("/fragments/0/rounds/1/outcome?wait_s=-1", r"wait_s='-1' must be"),
        ("/fragments/0/rounds/1/outcome?body=2", r"body='2' must be .* from 0 to 1"),
        ("/fragments/0/rounds/18446744073709551616/outcome", "round='184467440"),
    ],
)
def test_a_wrong_target_is_refused_by_name(target: str, message: str) -> None:
    """Each part of a target is named with its value and its bounds."""
    with pytest.raises((UsageError, Problem), match=message):
        get(target)


@pytest.mark.parametrize(
    "name", ["%2e%2e", "a%2Fb", "%00", "%E2%80%AE", ".", "a" * 129]
)
def test_a_name_in_a_path_plays_no_tricks(name: str) -> None:
    """A name that a frame could not carry is refused wherever it leads."""

    def leave() -> Call:
        head = head_of("DELETE", f"/islands/{name}?incarnation=1", HEADERS)
        return parse_call(head, Incoming.of(b""))

    with pytest.raises((UsageError, Problem), match=r"island=|holds the segment"):
        leave()


def test_a_query_that_is_needed_is_named() -> None:
    """Leaving without saying which life is refused."""
    head = head_of("DELETE", "/islands/a", HEADERS)
    with pytest.raises(UsageError, match="query must have 'incarnation'"):
        parse_call(head, Incoming.of(b""))


def test_a_body_where_none_belongs_is_refused() -> None:
    """Bytes that nobody asked for are not ignored."""
    head = head_of("GET", "/state/0", HEADERS)
    with pytest.raises(CorruptError, match="1 bytes follow the end of a body"):
        parse_call(head, Incoming.of(b"x"))


@pytest.mark.parametrize(
    "route", [row for row in ROUTES if row.is_call], ids=lambda route: route.name
)
def test_a_body_of_another_type_is_refused(route: Any) -> None:
    """A form that a browser could send by itself is none of ours."""
    if route.body is BodyKind.EMPTY:
        return
    target = route.target(*"1" * route.path.count("{"))
    with pytest.raises(UsageError, match="Content-Type 'text/plain' must be"):
        head_of(route.method, target, HEADERS | {"content-type": "text/plain"})


STATE = frame_of(a_state())
BULK: list[Call] = [
    PublishCall(frame_of(an_update())),
    FoundCall("a", 1, (STATE, STATE)),
    RecoverCall("a", 1, STATE, (AGREED.header,)),
]


def parsed(call: Call, data: bytes) -> Call:
    """Read other bytes in the place of a call's body."""
    sent = to_request(call, proof=proof_of(call))
    head = head_of(sent.method, sent.target, as_received(sent.headers))
    return parse_call(head, Incoming.of(data))


@pytest.mark.parametrize("call", BULK, ids=lambda call: type(call).__name__)
def test_every_truncation_of_frames_is_refused(call: Call) -> None:
    """Frames that end early are corrupt; a founding may end after a whole state."""
    whole = body_bytes(to_request(call))
    ends = {0, len(whole) // 2} if isinstance(call, FoundCall) else set()
    for length in set(range(len(whole))) - ends:
        with pytest.raises(CorruptError):
            parsed(call, whole[:length])


@pytest.mark.parametrize("call", BULK, ids=lambda call: type(call).__name__)
def test_bytes_after_frames_are_refused(call: Call) -> None:
    """A body that is longer than its frames is corrupt."""
    with pytest.raises(CorruptError):
        parsed(call, body_bytes(to_request(call)) + b"\0")


@settings(deadline=None)
@given(data=st.data())
def test_mutated_frames_raise_only_our_errors(data: st.DataObject) -> None:
    """A splice of other bytes is refused, or left to the verifying of the body."""
    call = data.draw(st.sampled_from(BULK))
    whole = body_bytes(to_request(call))
    at = data.draw(st.integers(0, len(whole)))
    splice = data.draw(st.binary(max_size=40))
    cut = data.draw(st.integers(0, 40))
    only_ours(lambda b: parsed(call, b), whole[:at] + splice + whole[at + cut :])


def test_a_third_outcome_is_refused() -> None:
    """A recovery brings the last two outcomes, and not a longer list."""
    call = RecoverCall("a", 1, STATE, (AGREED.header,) * 3)
    with pytest.raises(UsageError, match="More than 2 outcomes"):
        parsed(call, body_bytes(to_request(call)))


def test_a_state_is_only_read_as_what_it_is() -> None:
    """An island that asked for a state and gets half of one is told."""
    headers = {"content-type": "application/vnd.atoll.frame"}
    whole = body_bytes(to_request(PublishCall(frame_of(an_update()))))
    with pytest.raises(CorruptError, match="bytes are left of a body"):
        parse_reply(StateCall(0), 200, headers, Incoming.of(whole[:-1]))


def test_promised_sizes_reserve_no_memory() -> None:
    """Terabytes that are declared and not there cost nothing to refuse."""
    frame = frame_of(an_update())
    whole = bytearray(body_bytes(to_request(PublishCall(frame))))
    whole[8:12] = MAX_HEADER_BYTES.to_bytes(4, "little")

    tracemalloc.start()
    with pytest.raises(CorruptError, match="header_bytes=67108864 must be from"):
        parsed(PublishCall(frame), bytes(whole))
    with pytest.raises(UsageError, match="has 1099511627776 bytes, above the limit"):
        Incoming(bytes, 2**40).rest(name="joining", max_bytes=MAX_LARGE_BYTES)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 100_000
