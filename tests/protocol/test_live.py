"""What is asked of all live members is brought forward, and never differs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.island.numpy_model import vector_model
from atoll.protocol import Heartbeat, JoinRequest
from atoll.protocol.membership import LEASE_S, LiveMembers, Member, Members

MODEL = vector_model({"w": (3,)})
NAMES = ("a", "b", "c", "d")

events = st.lists(
    st.tuples(
        st.sampled_from(["join", "beat", "close", "leave", "look"]),
        st.sampled_from(NAMES),
        st.floats(0.0, LEASE_S),
        st.integers(0, 3),
    ),
    max_size=40,
)
"""What happens, to whom, how long after the last, and the step it is at."""


def after(members: Members, what: str, name: str, now_s: float, step: int) -> Members:
    """Return the members after one event, if it can happen."""
    member = members.known.get(name)
    if what == "join":
        known = member.incarnation if member else 0
        request = JoinRequest(model=MODEL, island=name, after=known)
        nonce = str(known + 1).encode()
        joined, _ = members.join(
            request, b"key", nonce, now_s=now_s, max_islands=None, step=step
        )
        return joined
    if member is None or member.has_left or what == "look":
        return members
    if what == "beat":
        beat = Heartbeat(island=name, incarnation=member.incarnation, step=step)
        return members.beat(member, beat, now_s=now_s)
    if what == "close":
        return members.close(member, now_s=now_s)
    return members.leave(member, because="")


@given(events)
def test_it_is_what_a_look_at_every_member_gives(
    said: list[tuple[str, str, float, int]],
) -> None:
    """Names, steps and who was not heard are the same, whatever was known before."""
    restored = {
        name: Member(
            island=name,
            incarnation=1,
            slot=slot,
            key=b"key",
            nonce=b"1",
            lease_until_s=LEASE_S,
            is_heard=False,
            unheard_until_s=LEASE_S,
        )
        for slot, name in enumerate(NAMES[:2])
    }
    members, now_s = Members(restored), 0.0
    for what, name, wait_s, step in said:
        now_s += wait_s
        members = after(members, what, name, now_s, step)
        seen, counted = members.look(now_s), LiveMembers.of(members.known, now_s)

        assert seen.names == counted.names
        assert seen.unreported == counted.unreported
        assert dict(seen.steps) == dict(counted.steps)
        assert seen.median_step == counted.median_step


def test_the_median_is_the_higher_of_two() -> None:
    """Of steps 1, 2, 3 and 5 it is 3; of nobody's, 0."""
    steps = {1: 1, 2: 1, 3: 1, 5: 1}
    names = frozenset(NAMES)
    live = LiveMembers(
        names=names, from_s=0, until_s=1, steps=steps, unreported=frozenset()
    )

    assert live.median_step == 3
    assert LiveMembers.of({}, 0.0).median_step == 0


def test_a_beat_looks_at_nobody_else() -> None:
    """The set of those who are live is the very same before and after."""
    members = after(Members({}), "join", "a", 0.0, 0)
    members = after(members, "join", "b", 0.0, 0)
    before = members.live(1.0)

    assert after(members, "beat", "a", 2.0, 1).live(2.0) is before
