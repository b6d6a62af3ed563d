"""Damaged bytes are found, and the round is not lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from atoll.errors import CorruptError
from atoll.exchange import CollectiveRun, Frame, Outcome
from atoll.exchange.calls import AgreedCall, Call, PublishCall
from atoll.exchange.collective import MemoryWorld
from atoll.exchange.collective.channel import (
    ControlMessage,
    MessageKind,
    packed,
    parsed,
)
from atoll.exchange.collective.world import CollectiveWorld, Parts
from atoll.testing.fixtures import anchor_of, enter, plain_settings, update_of
from tests.exchange.collective.ranks import URL, Bureau, attached


class Spoiling:
    """A `CollectiveWorld` whose network changes one part on its way."""

    def __init__(self, inner: MemoryWorld, *, swap_number: int) -> None:
        self._inner, self._left = inner, swap_number

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def send(self, rank: int, word: bytes) -> None:
        self._inner.send(rank, word)

    def receive(self, rank: int) -> bytes:
        return self._inner.receive(rank)

    def swap(self, outgoing: Parts, incoming: Parts) -> None:
        self._inner.swap(outgoing, incoming)
        if self._left == 0 and incoming:
            part = incoming[-1][1]
            part[len(part) // 2] ^= 1
        self._left -= 1


def reduced(
    spoil: Callable[[list[MemoryWorld]], list[CollectiveWorld]], bureau: Bureau
) -> list[Outcome]:
    """Return what two ranks take from a round over a network that spoils."""
    ranks = attached(bureau, [_run(each) for each in spoil(MemoryWorld.of(2))])
    joined = {name: enter(each, name) for name, each in ranks.items()}
    for (name, each), value in zip(ranks.items(), (1.0, 3.0), strict=True):
        each.publish(update_of(each, joined[name], value))
    outcomes = []
    for each in ranks.values():
        while (outcome := each.outcome(0, 1, wait_s=5.0)) is None:
            pass
        outcomes.append(outcome)
    return outcomes


def _run(world: CollectiveWorld) -> CollectiveRun:
    return CollectiveRun(URL, world)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("swap_number", [0, 1])
def test_what_is_spoilt_between_ranks_goes_by_the_coordinator(
    rank: int, swap_number: int
) -> None:
    """An update on its way to who reduces it, or a mean on its way back."""
    bureau = Bureau(plain_settings(start_islands=2))

    def spoil(worlds: list[MemoryWorld]) -> list[CollectiveWorld]:
        return [
            Spoiling(each, swap_number=swap_number) if each.rank == rank else each
            for each in worlds
        ]

    outcomes = reduced(spoil, bureau)
    was_spoilt = (rank == 0) == (swap_number == 0)  # rank 0 reduces the only share

    assert [each.agreed.body.view(np.float32)[0] for each in outcomes] == [2.0, 2.0]
    assert float(bureau.service.weights[0].anchor[0]) == -2.0
    assert bureau.agreed() == (0 if was_spoilt else 1)
    assert any(isinstance(call, PublishCall) for call in bureau.calls) == was_spoilt


@pytest.mark.parametrize("lie", ["vouchers", "no vouchers", "body"])
def test_an_outcome_that_islands_do_not_vouch_for_is_refused(lie: str) -> None:
    """A leader that brings something else is found; the round is then reduced anew."""
    bureau = Bureau(plain_settings(start_islands=2))
    handle = bureau.service.handle

    def lying(call: Call, now_s: float) -> object:
        if isinstance(call, AgreedCall) and call.agreed is not None:
            words, agreed = call.vouchers, call.agreed
            if lie == "body":
                agreed = Frame(agreed.header, np.zeros_like(agreed.body))
            else:
                words = () if lie == "no vouchers" else words[::-1]
            call = replace(call, agreed=agreed, vouchers=words)
        return handle(call, now_s)

    bureau.service.handle = lying  # type: ignore[method-assign,assignment]  # the wire
    outcomes = reduced(list, bureau)

    assert [each.agreed.body.view(np.float32)[0] for each in outcomes] == [2.0, 2.0]
    assert any(isinstance(call, PublishCall) for call in bureau.calls)


def test_an_update_that_is_not_what_it_says_is_told_to_its_island() -> None:
    """Its bytes do not verify at whoever reduces them, nor at the coordinator."""
    bureau = Bureau(plain_settings(start_islands=2))
    ranks = attached(bureau, [_run(each) for each in MemoryWorld.of(2)])
    joined = {name: enter(each, name) for name, each in ranks.items()}
    good = update_of(ranks["i1"], joined["i1"], 1.0)
    ranks["i1"].publish(Frame(good.header, good.body ^ np.uint8(1)))
    ranks["i0"].publish(update_of(ranks["i0"], joined["i0"], 3.0))

    with pytest.raises(CorruptError):
        _ = [ranks["i1"].outcome(0, 1, wait_s=5.0) for _ in range(4)]
    ranks["i1"].publish(good)
    while ranks["i0"].outcome(0, 1, wait_s=5.0) is None:
        pass
    assert anchor_of(ranks["i0"]) == -2.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 17,
        packed(ControlMessage(MessageKind.READY, 1, 2, (b"abc",)))[:-1],
        packed(ControlMessage(MessageKind.READY, 1, 2, (b"abc",))) + b"x",
        bytes([99]) + packed(ControlMessage(MessageKind.BEAT))[1:],
    ],
)
def test_what_is_no_word_is_refused(data: bytes) -> None:
    """Cut off, too long, or of another version."""
    with pytest.raises(CorruptError, match="are no message of a collective"):
        parsed(data)


def test_a_word_arrives_as_it_was_said() -> None:
    """With all its parts, empty ones too."""
    word = ControlMessage(MessageKind.GO, 7, 2**40, (b"", b"one", b"", b"two"))

    assert parsed(packed(word)) == word
