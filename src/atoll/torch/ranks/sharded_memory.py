"""The memory of an island with weights on many ranks. Implements `Memory`.

The leader's host calls it like the memory of one process. Each method makes every rank
do the same with its part; the leader assembles one fragment at a time.
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
from atoll.torch.ranks.channel import Background, Gatherings
from atoll.torch.ranks.parts import Parts, outline
from atoll.weights import FragmentLayout, FragmentState, Layout, Terms
from atoll.weights.layout import F32
from atoll.wire import Verdict

MakeParts = Callable[[RunSettings], Parts]


class Spread:
    """Weights on several ranks, as the leader of their island has them."""

    def __init__(
        self, gatherings: Gatherings, background: Background, parts_of: MakeParts
    ) -> None:
        self._gatherings, self._background = gatherings, background
        self._parts_of, self._buffers = parts_of, HostBuffers()
        self._parts: Parts | None = None

    @property
    def parts(self) -> Parts:
        assert self._parts is not None, "nothing has been laid out"
        return self._parts

    def lay_out(self, layout: Layout, joined: JoinReply) -> None:
        require_lockstep(joined.settings)
        settings = joined.settings.to_dict()
        self._gatherings.order({"do": "lay_out", "settings": settings})
        self._parts = self._parts_of(joined.settings)

    def begin(
        self,
        index: int,
        layout: FragmentLayout,
        terms: Terms,
        state: FragmentState | None,
    ) -> IslandFragment:
        founds = state is None
        self._gatherings.order({"do": "begin", "index": index, "founds": founds})
        line = self._gatherings.line
        own = self.parts.begin(line, index, state, founds=founds)
        # Known from now on by the digest of the whole, as the run knows it.
        slot = IslandFragment(
            index=index, layout=layout, state=own.state, up=terms.up, residual=None
        )
        slot.state.digest = state.digest if state is not None else self.measure(slot)
        slot.note_held()
        return slot

    def hold(self, slot: IslandFragment, number: int) -> F32:
        self._gatherings.order({"do": "hold", "index": slot.index, "number": number})
        return self.parts.memory.hold(self._own(slot), number)

    def take(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        mode: str,
        *,
        keep_local: float,
    ) -> None:
        self._gatherings.order(
            {
                "do": "take",
                "index": slot.index,
                "number": sealed.number,
                "way": mode,
                "keep_local": keep_local,
            }
        )
        memory = self.parts.memory
        memory.take(self._own(slot), sealed, mode, keep_local=keep_local)

    def forget(self, sealed: UpdateInFlight) -> None:
        self._gatherings.order({"do": "forget", "number": sealed.number})
        self.parts.memory.forget(sealed)

    def measure(self, slot: IslandFragment) -> bytes:
        index, count = slot.index, slot.state.count
        order = {"do": "measure", "index": index, "count": count}
        line = self._background.line
        return self._background.do(
            order, lambda: self.parts.measure(line, index, count=count)
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
        index, line = slot.index, self._background.line
        body = self._buffers.body(slot.up.body_bytes(slot.layout.elements))
        how = {"seed": seed, "decay": decay, "is_difference": is_difference}
        order = {"do": "seal", "index": index, "number": sealed.number, **how}
        try:
            norm, _ = self._background.do(
                order,
                lambda: self.parts.seal(
                    line,
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
        own, memory = self._own(slot), self.parts.memory
        self._background.do(order, lambda: memory.keep_loaded(own, sealed))

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
        line, index = self._background.line, slot.index
        order = {"do": "replace", "index": index}
        own, _ = self._background.do(
            order, lambda: self.parts.scatter(line, index, state)
        )
        own.digest = state.digest
        slot.state = self._own(slot).state = own

    def settle(
        self, slot: IslandFragment, sealed: UpdateInFlight, verdict: Verdict
    ) -> None:
        order = {
            "do": "settle",
            "index": slot.index,
            "number": sealed.number,
            "verdict": verdict.name,
        }
        own, memory = self._own(slot), self.parts.memory
        self._background.do(order, lambda: memory.settle_residual(own, sealed, verdict))
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
        own, memory = self._own(slot), self.parts.memory
        self._background.do(
            order, lambda: memory.since(own, flying, rest, is_settled=is_settled)
        )

    def has_left_over(self, slot: IslandFragment) -> bool:
        flying = slot.sealed
        is_flying = flying is not None and flying.outcome is None
        number = flying.number if flying is not None and is_flying else None
        order = {"do": "left_over", "index": slot.index, "number": number}
        own = self._own(slot)
        mine = own.residual
        if flying is not None and is_flying:
            mine = flying.residual_after
        answers = self._background.ask(order)
        has_mine = mine is not None and bool(mine.any())
        return has_mine or any(said["has"] for said in answers)

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
        self._gatherings.order({**order, "slots": [outline(each) for each in slots]})
        own = [
            replace(slot, layout=mine.layout, residual=mine.residual)
            for slot, mine in ((each, self._own(each)) for each in slots)
        ]
        return self.parts.memory.saving(own, sync, trained=trained, is_exact=is_exact)

    def as_work(self, saved: SavedIsland, sync: SyncSection) -> SavedIsland:
        trained = saved.inner_steps, saved.tokens
        self._gatherings.order({"do": "as_work", "made": trained})
        parts = self.parts
        work = as_work(saved.fragments, parts.layout, parts.view, sync, trained=trained)
        return replace(saved, is_exact=False, fragments=work)

    def require_fitting(self, layout: Layout, saved: Sequence[SavedFragment]) -> None:
        require_sizes([each.elements for each in self.parts.layout], saved)
        self._background.ask({"do": "fit"})

    def resume(
        self, index: int, layout: FragmentLayout, terms: Terms, saved: SavedFragment
    ) -> IslandFragment:
        self._gatherings.order({"do": "stand", "index": index})
        own = self.parts.resume(index, saved)
        slot = replace(own, layout=layout, residual=None)
        # Known by the digest of the whole, as in `begin`.
        slot.state.digest = saved.digest
        slot.note_held()
        return slot

    def remake(
        self, slot: IslandFragment, saved: SavedFragment, *, seed: int, decay: float
    ) -> tuple[np.ndarray, float]:
        index, line = slot.index, self._background.line
        body = np.empty(slot.up.body_bytes(slot.layout.elements), np.uint8)
        order = {"do": "remake", "index": index, "seed": seed, "decay": decay}
        norm, _ = self._background.do(
            order,
            lambda: self.parts.remake(
                line, index, saved, seed=seed, decay=decay, body=body
            ),
        )
        return body, norm

    def give(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        self._gatherings.order(
            {"do": "give", "index": slot.index, "left": remaining.value}
        )
        self.parts.memory.give(self._own(slot), saved, remaining)

    def leave_over(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        order = {"do": "leave_over", "index": slot.index, "left": remaining.value}
        own, memory = self._own(slot), self.parts.memory
        self._background.do(order, lambda: memory.leave_over(own, saved, remaining))

    def gathered(self, slot: IslandFragment, count: int) -> list[F32]:
        """Return the first vectors of a fragment's state, whole."""
        index, line = slot.index, self._background.line
        whole = [np.empty(slot.layout.elements, np.float32) for _ in range(count)]
        own = slot.state.vectors[:count]
        self._background.do(
            {"do": "gather", "index": index, "count": count},
            lambda: self.parts.gather(line, index, own, whole=whole),
        )
        return whole

    def _step(self, slot: IslandFragment, agreed: Frame) -> None:
        header, index, line = agreed.header, slot.index, self._background.line
        outer, count = header.outer, slot.state.count
        assert outer is not None
        order = {
            "do": "step",
            "index": index,
            "down": header.codec,
            "outer": asdict(outer),
            "count": count,
        }
        self._background.do(
            order,
            lambda: self.parts.step(
                line,
                index,
                down=header.codec,
                outer=outer,
                count=count,
                body=agreed.body,
            ),
        )

    def _own(self, slot: IslandFragment) -> IslandFragment:
        return self.parts.slots[slot.index]


def require_lockstep(settings: RunSettings) -> None:
    """Return when all ranks can know from the settings alone what is due when.

    Raises:
        UsageError: naming the setting that says otherwise.
    """
    if settings.sync.dynamic_local_updates:
        raise UsageError(
            "sync.dynamic_local_updates=true lets an island choose its own inner "
            "steps, and the ranks of this one must make the same. Turn it off for a "
            "run with islands of several ranks."
        )
    if settings.sync.mode != "sync":
        raise UsageError(
            f"sync.mode={settings.sync.mode!r} lets rounds come when they come, and "
            "the ranks of this island must take them at the same step. Use "
            "sync.mode='sync' for a run with islands of several ranks."
        )
