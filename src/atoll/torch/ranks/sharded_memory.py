"""The memory of an island with weights on many ranks. Implements `Memory`.

The leader's host calls it like the memory of one process. Each method executes the same
operation on every rank's part; the leader assembles one fragment at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np

from atoll.errors import CorruptError, UsageError
from atoll.exchange import Frame
from atoll.island.fragment import IslandFragment, UpdateInFlight
from atoll.island.memory import HostBuffers, require_sizes
from atoll.island.saved_state import SavedFragment, SavedIsland
from atoll.island.snapshot import as_work
from atoll.protocol import JoinReply
from atoll.protocol.island import RemainingWork
from atoll.settings import RunSettings, SyncSection
from atoll.torch.ranks.channel import BackgroundOrders, CollectiveCalls
from atoll.torch.ranks.fragments import RankFragments, summary_of
from atoll.weights import FragmentLayout, FragmentState, Layout, Terms
from atoll.weights.layout import F32
from atoll.wire import Verdict

MakeFragments = Callable[[RunSettings], RankFragments]


class ShardedMemory:
    """Weights on several ranks, at the leader of their island."""

    def __init__(
        self,
        calls: CollectiveCalls,
        background: BackgroundOrders,
        make_fragments: MakeFragments,
    ) -> None:
        self._calls, self._background = calls, background
        self._make_fragments, self._buffers = make_fragments, HostBuffers()
        self._fragments: RankFragments | None = None

    @property
    def fragments(self) -> RankFragments:
        assert self._fragments is not None, "nothing has been laid out"
        return self._fragments

    def lay_out(self, layout: Layout, joined: JoinReply) -> None:
        require_lockstep(joined.settings)
        settings = joined.settings.to_dict()
        self._calls.order({"do": "lay_out", "settings": settings})
        self._fragments = self._make_fragments(joined.settings)

    def begin(
        self,
        index: int,
        layout: FragmentLayout,
        terms: Terms,
        state: FragmentState | None,
    ) -> IslandFragment:
        founds = state is None
        self._calls.order({"do": "begin", "index": index, "founds": founds})
        channel = self._calls.channel
        part = self.fragments.begin(channel, index, state, founds=founds)
        # The slot has the digest of the whole fragment, as the run has.
        slot = IslandFragment(
            index=index, layout=layout, state=part.state, up=terms.up, residual=None
        )
        slot.state.digest = state.digest if state is not None else self.measure(slot)
        slot.note_held()
        return slot

    def hold(self, slot: IslandFragment, number: int) -> F32:
        self._calls.order({"do": "hold", "index": slot.index, "number": number})
        return self.fragments.memory.hold(self._own_slot(slot), number)

    def take(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        mode: str,
        *,
        keep_local: float,
    ) -> None:
        self._calls.order(
            {
                "do": "take",
                "index": slot.index,
                "number": sealed.number,
                "way": mode,
                "keep_local": keep_local,
            }
        )
        memory = self.fragments.memory
        memory.take(self._own_slot(slot), sealed, mode, keep_local=keep_local)

    def forget(self, sealed: UpdateInFlight) -> None:
        self._calls.order({"do": "forget", "number": sealed.number})
        self.fragments.memory.forget(sealed)

    def measure(self, slot: IslandFragment) -> bytes:
        index, count = slot.index, slot.state.count
        order = {"do": "measure", "index": index, "count": count}
        channel = self._background.channel
        return self._background.execute(
            order, lambda: self.fragments.measure(channel, index, count=count)
        )[0]

    def seal(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        *,
        seed: int,
        decay: float,
        is_difference: bool,
    ) -> tuple[np.ndarray, float]:
        index, channel = slot.index, self._background.channel
        body = self._buffers.body(slot.up.body_bytes(slot.layout.elements))
        options = {"seed": seed, "decay": decay, "is_difference": is_difference}
        order = {"do": "seal", "index": index, "number": sealed.number, **options}
        try:
            norm, _ = self._background.execute(
                order,
                lambda: self.fragments.seal(
                    channel,
                    index,
                    sealed,
                    seed=seed,
                    decay=decay,
                    is_difference=is_difference,
                    body=body,
                ),
            )
        except BaseException:
            self._buffers.give_back(body)
            raise
        return body, norm

    def keep_loaded(self, slot: IslandFragment, sealed: UpdateInFlight) -> None:
        order = {"do": "keep_loaded", "index": slot.index, "number": sealed.number}
        own_slot, memory = self._own_slot(slot), self.fragments.memory
        self._background.execute(order, lambda: memory.keep_loaded(own_slot, sealed))

    def apply(self, slot: IslandFragment, agreed: Frame) -> None:
        state, header = slot.state, agreed.header
        state.require_next(header, elements=slot.layout.elements)
        if header.elements:
            assert header.outer is not None
            state.count += header.outer.optimizer == "adam"
            state.digest = bytes(len(state.digest))
            self._step(slot, agreed)
            state.digest = self.measure(slot)
        state.round = header.round

    def replace(self, slot: IslandFragment, state: FragmentState) -> None:
        if len(state.anchor) != slot.layout.elements:
            raise CorruptError(
                f"The state of fragment {slot.index} has {len(state.anchor)} elements, "
                f"and the fragment {slot.layout.elements}. Ask for the state again."
            )
        channel, index = self._background.channel, slot.index
        order = {"do": "replace", "index": index}
        part, _ = self._background.execute(
            order, lambda: self.fragments.scatter(channel, index, state)
        )
        part.digest = state.digest
        slot.state = self._own_slot(slot).state = part

    def settle(
        self, slot: IslandFragment, sealed: UpdateInFlight, verdict: Verdict
    ) -> None:
        order = {
            "do": "settle",
            "index": slot.index,
            "number": sealed.number,
            "verdict": verdict.name,
        }
        own_slot, memory = self._own_slot(slot), self.fragments.memory
        self._background.execute(
            order, lambda: memory.settle_residual(own_slot, sealed, verdict)
        )
        if sealed.frame is not None and sealed.frame.header.elements:
            self._buffers.give_back(sealed.frame.body)

    def since(
        self,
        slot: IslandFragment,
        flying: UpdateInFlight,
        rest: UpdateInFlight,
        *,
        is_settled: bool,
    ) -> None:
        order = {
            "do": "since",
            "index": slot.index,
            "flying": flying.number,
            "rest": rest.number,
            "is_settled": is_settled,
        }
        own_slot, memory = self._own_slot(slot), self.fragments.memory
        self._background.execute(
            order, lambda: memory.since(own_slot, flying, rest, is_settled=is_settled)
        )

    def has_left_over(self, slot: IslandFragment) -> bool:
        flying = slot.sealed
        is_flying = flying is not None and flying.outcome is None
        number = flying.number if flying is not None and is_flying else None
        order = {"do": "left_over", "index": slot.index, "number": number}
        residual = self._own_slot(slot).residual
        if flying is not None and is_flying:
            residual = flying.residual_after
        answers = self._background.request(order)
        is_own = residual is not None and bool(residual.any())
        return is_own or any(answer["has"] for answer in answers)

    def whole(self, slot: IslandFragment) -> FragmentState:
        vectors = self.gathered(slot, 1 + len(slot.state.moments))
        state = slot.state
        return FragmentState(
            vectors[0], vectors[1:], round=state.round, count=state.count
        )

    def saving(
        self,
        slots: Sequence[IslandFragment],
        sync: SyncSection,
        *,
        trained: tuple[int, int],
        is_exact: bool,
    ) -> list[SavedFragment]:
        order = {"do": "save", "made": trained, "is_exact": is_exact}
        self._calls.order({**order, "slots": [summary_of(slot) for slot in slots]})
        pairs = [(slot, self._own_slot(slot)) for slot in slots]
        own_slots = [
            replace(slot, layout=own_slot.layout, residual=own_slot.residual)
            for slot, own_slot in pairs
        ]
        return self.fragments.memory.saving(
            own_slots, sync, trained=trained, is_exact=is_exact
        )

    def as_work(self, saved: SavedIsland, sync: SyncSection) -> SavedIsland:
        trained = saved.inner_steps, saved.tokens
        self._calls.order({"do": "as_work", "made": trained})
        parts = self.fragments
        work = as_work(saved.fragments, parts.layout, parts.view, sync, trained=trained)
        return replace(saved, is_exact=False, fragments=work)

    def require_fitting(self, layout: Layout, saved: Sequence[SavedFragment]) -> None:
        require_sizes([part.elements for part in self.fragments.layout], saved)
        self._background.request({"do": "fit"})

    def resume(
        self, index: int, layout: FragmentLayout, terms: Terms, saved: SavedFragment
    ) -> IslandFragment:
        self._calls.order({"do": "stand", "index": index})
        own_slot = self.fragments.resume(index, saved)
        slot = replace(own_slot, layout=layout, residual=None)
        # The digest of the whole fragment, as in `begin`.
        slot.state.digest = saved.digest
        slot.note_held()
        return slot

    def remake(
        self, slot: IslandFragment, saved: SavedFragment, *, seed: int, decay: float
    ) -> tuple[np.ndarray, float]:
        index, channel = slot.index, self._background.channel
        body = np.empty(slot.up.body_bytes(slot.layout.elements), np.uint8)
        order = {"do": "remake", "index": index, "seed": seed, "decay": decay}
        norm, _ = self._background.execute(
            order,
            lambda: self.fragments.remake(
                channel, index, saved, seed=seed, decay=decay, body=body
            ),
        )
        return body, norm

    def give(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        self._calls.order({"do": "give", "index": slot.index, "left": remaining.value})
        self.fragments.memory.give(self._own_slot(slot), saved, remaining)

    def leave_over(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        order = {"do": "leave_over", "index": slot.index, "left": remaining.value}
        own_slot, memory = self._own_slot(slot), self.fragments.memory
        self._background.execute(
            order, lambda: memory.leave_over(own_slot, saved, remaining)
        )

    def gathered(self, slot: IslandFragment, count: int) -> list[F32]:
        """Return the first vectors of a fragment's state, from all ranks."""
        index, channel = slot.index, self._background.channel
        vectors = [np.empty(slot.layout.elements, np.float32) for _ in range(count)]
        parts = slot.state.vectors[:count]
        self._background.execute(
            {"do": "gather", "index": index, "count": count},
            lambda: self.fragments.gather(channel, index, parts, out=vectors),
        )
        return vectors

    def _step(self, slot: IslandFragment, agreed: Frame) -> None:
        header, index, channel = agreed.header, slot.index, self._background.channel
        outer, count = header.outer, slot.state.count
        assert outer is not None
        order = {
            "do": "step",
            "index": index,
            "down": header.codec,
            "outer": asdict(outer),
            "count": count,
        }
        self._background.execute(
            order,
            lambda: self.fragments.step(
                channel,
                index,
                down=header.codec,
                outer=outer,
                count=count,
                body=agreed.body,
            ),
        )

    def _own_slot(self, slot: IslandFragment) -> IslandFragment:
        return self.fragments.slots[slot.index]


def require_lockstep(settings: RunSettings) -> None:
    """Raise unless all ranks can derive every sync from the settings alone.

    Raises:
        UsageError: they cannot. The message has the setting.
    """
    if settings.sync.dynamic_local_updates:
        raise UsageError(
            "sync.dynamic_local_updates=true lets an island choose its own inner "
            "steps, and the ranks of this one must make the same. Turn it off for a "
            "run with islands of several ranks."
        )
    if settings.sync.mode != "sync":
        raise UsageError(
            f"sync.mode={settings.sync.mode!r} lets rounds come at any step, and "
            "the ranks of this island must take them at the same step. Use "
            "sync.mode='sync' for a run with islands of several ranks."
        )
