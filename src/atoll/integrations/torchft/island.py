"""An island that trains with torchft, and keeps up with the others.

The state of the training (weights, optimizers, the step) is torchft's and its user's;
all islands that *hold* it hold the same. An island without it requests it, and
contributes nothing until it has it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import torch

from atoll import __version__
from atoll.errors import CorruptError, FoundingLost, Unreachable, UsageError
from atoll.exchange import Exchange
from atoll.integrations.torchft.fragment import (
    ABSTAINS,
    POLL_S,
    ReducedFragment,
    RoundClient,
    RoundResult,
    roster_of,
)
from atoll.integrations.torchft.settings import layout_of, require_settings, spec_of
from atoll.integrations.torchft.state_transfer import (
    REQUESTS,
    Incarnation,
    Served,
    StateChannel,
    StateTransfer,
    TransferredState,
    is_election,
    is_unserved,
    serve,
    transfer_of,
)
from atoll.island.entry import fetch_state, state_frame
from atoll.island.environment import (
    credentials_from_environment,
    island_from_environment,
    run_from_environment,
)
from atoll.island.join import RunConnection
from atoll.protocol import JoinReply, JoinRequest, ModelSpec, Stats
from atoll.runtime import SystemClock
from atoll.settings import RunSettings
from atoll.weights import FragmentLayout, FragmentState, terms_of
from atoll.weights.layout import F32
from atoll.wire import Header

log = logging.getLogger("atoll")


class TorchftIsland:
    """One incarnation of an island that trains with torchft.

    The training thread calls `keep_up`, `apply_result` and `leave`; `exchange` may run
    in a background thread between the two.
    """

    def __init__(
        self,
        run: Exchange | str | None,
        modules: Sequence[torch.nn.Module],
        registry: StateRegistry,
        *,
        island: str | None,
        init_sync: bool,
    ) -> None:
        self._model = spec_of(modules)
        self._num_fragments = len(modules)
        self._registry, self._init_sync = registry, init_sync
        self._exchange, self._island, self._leaving = _connect(run, island)
        self._client: RoundClient | None = None
        self._fragments: list[ReducedFragment] = []
        self._channel: StateChannel | None = None
        self._has_state = self._has_held = False
        self._num_requests = 0
        self._served: Served = {}
        self._pending: StateTransfer | None = None
        self._unused_result: RoundResult | None = None
        self.step = self.batches_committed = 0
        self.counted: tuple[str, ...] = ()
        """The islands whose updates are in the last mean, by name."""

    @property
    def client(self) -> RoundClient:
        assert self._client is not None
        return self._client

    @property
    def channel(self) -> StateChannel:
        assert self._channel is not None
        return self._channel

    @property
    def has_joined(self) -> bool:
        return self._client is not None

    @property
    def name(self) -> str:
        return self.client.joined.island

    @property
    def settings(self) -> RunSettings:
        return self.client.joined.settings

    @property
    def fragment(self) -> ReducedFragment:
        """The fragment that the present step reduces."""
        return self._fragments[self.step % self._num_fragments]

    def restore(self, *, step: int, batches_committed: int) -> None:
        """Continue from a checkpoint whose state its user has loaded."""
        self.step, self.batches_committed = step, batches_committed
        self._has_held = True

    def keep_up(self) -> None:
        """Hold the state that the next round is about, however long that takes.

        The island may send the state to others here, or load it, or both.
        """
        if self._client is None:
            self._join()
        if self._pending is not None:
            transfer, self._pending = self._pending, None
            self._take_part(transfer)
        if self._has_state:
            self._check_rounds()
        while not self._has_state:
            self._request_state()
        self._has_held = True

    def exchange(self, values: F32, gives_up: Callable[[], bool]) -> RoundResult:
        """Contribute to the round of this step, and return its result."""
        if self._unused_result is not None:
            result, self._unused_result = self._unused_result, None
            return result
        fragment = self.fragment
        fragment.publish(values, step=self.step)
        outcome = self.client.outcome(fragment.index, fragment.round, gives_up=gives_up)
        return fragment.take(outcome)

    def refuse(self, reason: str) -> None:
        """Publish a refused update for this step's round, so that it can close."""
        fragment = self.fragment
        if fragment.last_published < fragment.round:
            self.client.refuse(
                fragment.index, fragment.round, reason, inner_steps=self.step + 1
            )
            fragment.last_published = fragment.round

    def apply_result(self, result: RoundResult) -> bool:
        """Advance to the next step; return whether there is a mean to step by."""
        agreed = result.agreed
        transfer = transfer_of(agreed, num_fragments=self._num_fragments)
        if is_election(agreed):
            self._has_state = False  # those who took part continue from another state
        elif transfer is not None and is_unserved(transfer, self._served):
            serve(transfer, self._served)
            self._pending = transfer
        if not result.has_counted:
            self._log_missed(result)
        if result.mean is None:
            return False
        self.counted = tuple(entry.island for entry in roster_of(agreed).counted)
        self.step += 1
        self.batches_committed += len(self.counted)
        period = self.settings.sync.sync_every
        self.client.schedule_step = self.step * period // self._num_fragments
        return True

    def keep(self, result: RoundResult | None) -> None:
        """Use a result that this step did not apply in the next step.

        The others have made their outer step by it, and so must this island. Its
        training in between is lost.
        """
        self._unused_result = result

    def lose(self) -> None:
        """Mark the state as lost: a mean was agreed that training cannot take."""
        self._has_state = False

    def leave(self) -> None:
        """End the membership. Safe to repeat."""
        client, self._client = self._client, None
        if client is None:
            return
        client.stops.set()
        with suppress(Unreachable), self._leaving:
            self._exchange.leave(client.joined.island, client.joined.incarnation)

    def _join(self) -> None:
        client, fragments, channel = enter(
            self._exchange,
            self._model,
            self._island,
            num_fragments=self._num_fragments,
        )
        self._client, self._fragments, self._channel = client, fragments, channel
        is_fresh = set(client.joined.position.rounds[: self._num_fragments]) <= {1}
        if client.joined.is_founder or (is_fresh and not self._init_sync):
            for fragment in fragments:
                fragment.round = 1  # the state may be a round ahead already
            self._has_state = True

    def _take_part(self, transfer: StateTransfer) -> None:
        if transfer.donor == self._incarnation:
            self.channel.send(self._state().packed(), transfer=transfer.number)
        else:
            self.channel.stand_by(transfer=transfer.number)

    @property
    def _incarnation(self) -> Incarnation:
        return self.client.joined.island, self.client.joined.incarnation

    def _check_rounds(self) -> None:
        """Drop the state if rounds were agreed without this island."""
        rounds = self.client.position().rounds
        if not rounds:
            return  # it has founded the run, and no reply has had a position since
        for fragment in self._fragments:
            # The outcome of one round can be taken in the place of this step's own.
            may_pass = 1 if fragment is self.fragment else 0
            while rounds[fragment.index] > fragment.round + may_pass:
                outcome = self.client.look(fragment.index, fragment.round)
                agreed = outcome.agreed.header if outcome else None
                if agreed is None or agreed.elements or is_election(agreed):
                    self._has_state = False
                    return
                fragment.pass_void(agreed)

    def _request_state(self) -> None:
        """Request the state once; the donor may leave before it has sent it."""
        self._num_requests += 1
        held_step = self.step if self._has_held else None
        request = StateRequest(self.client, self._fragments, held_step=held_step)
        transfer = request.send(self._num_requests)
        if transfer.donor == self._incarnation:
            self._lead(transfer)
            return
        data = self.channel.receive(transfer=transfer.number)
        if data is not None:
            self._load(TransferredState.of(data, num_fragments=self._num_fragments))

    def _lead(self, transfer: StateTransfer) -> None:
        """Continue from the own state: no remaining island has more steps."""
        for fragment in self._fragments:
            fragment.start_over()
            fragment.round = fragment.state.round + 1
        serve(transfer, self._served)
        self._has_state = True
        if len(transfer.requests) > 1:
            self._take_part(transfer)

    def _log_missed(self, result: RoundResult) -> None:
        log.log(
            logging.INFO if result.reason in (ABSTAINS, REQUESTS) else logging.WARNING,
            "round %d of fragment %d has no work of island %s in it: %s",
            result.agreed.round,
            result.agreed.fragment,
            self.name,
            result.reason or "it has an update of an earlier incarnation",
        )

    def _state(self) -> TransferredState:
        return TransferredState(
            registered=self._registry.read(),
            step=self.step,
            batches_committed=self.batches_committed,
            rounds=[fragment.round - 1 for fragment in self._fragments],
            served=self._served,
        )

    def _load(self, state: TransferredState) -> None:
        self._registry.load(state.registered)
        self.step, self.batches_committed = state.step, state.batches_committed
        self._served = state.served
        for fragment, committed in zip(self._fragments, state.rounds, strict=True):
            fragment.start_over()
            fragment.round = fragment.abstains_through = committed + 1
        self._has_state, self._unused_result = True, None


def _connect(
    run: Exchange | str | None, island: str | None
) -> tuple[Exchange, str | None, AbstractContextManager[object]]:
    """Return the exchange of a run, the island's name, and a context for leaving.

    A run that is given by its URL is followed when it moves.
    """
    if run is None:
        run = run_from_environment()
    if not isinstance(run, str):
        return run, island, nullcontext()
    name = island or island_from_environment()
    environment, clock = credentials_from_environment(), SystemClock()
    connection = RunConnection(run, island=name, paths=environment, clock=clock)
    connection.exchange.stats = lambda: Stats(version=__version__)
    return connection.exchange, name, connection.leaving()


def enter(
    exchange: Exchange, model: ModelSpec, island: str | None, *, num_fragments: int
) -> tuple[RoundClient, list[ReducedFragment], StateChannel]:
    """Join; found the run if it is empty. On an error the island is no member.

    Raises:
        SettingsError: the run is not one for torchft. The message has the setting.
        ModelError: the modules are not those of the run.
    """
    request = JoinRequest(model=model, island=island)
    while True:
        joined = exchange.join(request)
        try:
            require_settings(joined.settings, num_fragments=num_fragments)
            layouts, parcels = layout_of(model, joined.settings)
            client = RoundClient(exchange, joined)
            fragments = [
                ReducedFragment(
                    client, index, layout, _state_of(exchange, joined, index, layout)
                )
                for index, layout in enumerate(layouts)
            ]
            return client, fragments, _channel(client, len(layouts), parcels)
        except FoundingLost:
            continue  # still a member: another island has founded the run, or it will
        except BaseException:
            exchange.leave(joined.island, joined.incarnation)
            raise


def _channel(client: RoundClient, index: int, layout: FragmentLayout) -> StateChannel:
    joined, round = client.joined, 1
    if joined.is_founder:
        _state_of(client.exchange, joined, index, layout)
    else:
        round = joined.position.rounds[index]
    # All islands know how it began; one that takes part in a transfer fetches the rest.
    optimizer = terms_of(layout, joined.settings).outer.optimizer
    zeros = np.zeros(layout.elements, np.float32)
    client.hold(index, FragmentState.found(zeros, optimizer))
    return StateChannel(client, index, layout, round)


def _state_of(
    exchange: Exchange, joined: JoinReply, index: int, layout: FragmentLayout
) -> FragmentState:
    """Return the run's state of a fragment; the founder publishes one of zeros."""
    if not joined.is_founder:
        return fetch_state(exchange, index)
    outer = terms_of(layout, joined.settings).outer
    state = FragmentState.found(np.zeros(layout.elements, np.float32), outer.optimizer)
    exchange.publish(state_frame(joined, index, state, outer))
    return state


class StateRequest:
    """Requests the state by a refused update in every open round."""

    def __init__(
        self,
        client: RoundClient,
        fragments: list[ReducedFragment],
        *,
        held_step: int | None,
    ) -> None:
        self._client, self._fragments = client, fragments
        self._held_steps = 0 if held_step is None else held_step + 1
        self._unanswered: set[int] = set()
        """Fragments whose round has the request, and may be over."""

    def send(self, number: int) -> StateTransfer:
        """Return the transfer that a roster with request `number` calls for.

        Raises:
            UsageError: the run has advanced, and no remaining island holds its state.
        """
        waits_for: tuple[int, int] | None = None
        while True:
            # Every round with the request is looked at, before another gets it: the
            # islands that hold the state act on the first roster that lists it.
            for fragment in self._fragments:
                transfer = self._answer(fragment, number)
                if transfer is not None:
                    return transfer
            rounds = self._client.position(waits_for).rounds
            self._publish(rounds, number)
            fragment = min(self._fragments, key=lambda other: rounds[other.index])
            waits_for = (fragment.index, fragment.last_published)
            self._client.look(*waits_for, wait_s=POLL_S)

    def _publish(self, rounds: tuple[int, ...], number: int) -> None:
        for fragment in self._fragments:
            is_new = fragment.last_published < rounds[fragment.index]
            if is_new and fragment.index not in self._unanswered:
                fragment.last_published = rounds[fragment.index]
                self._unanswered.add(fragment.index)
                self._client.refuse(
                    fragment.index,
                    fragment.last_published,
                    REQUESTS,
                    inner_steps=self._held_steps,
                    tokens=number,
                )

    def _answer(self, fragment: ReducedFragment, number: int) -> StateTransfer | None:
        """Return the transfer of the last round with the request, if it is over."""
        if fragment.index not in self._unanswered:
            return None
        outcome = self._client.look(fragment.index, fragment.last_published)
        if outcome is None:
            return None
        self._unanswered.discard(fragment.index)
        return self._transfer_of(outcome.agreed.header, number)

    def _transfer_of(self, agreed: Header, number: int) -> StateTransfer | None:
        """Return the transfer that a round calls for, if it is for this request."""
        joined = self._client.joined
        entry = roster_of(agreed).entry(joined.island)
        own_key = (joined.incarnation, number)
        if entry is None or (entry.incarnation, entry.tokens) != own_key:
            return None
        transfer = transfer_of(agreed, num_fragments=len(self._fragments))
        if transfer and not transfer.donor_has_state:
            self._require_blank()
        return transfer

    def _require_blank(self) -> None:
        """Raise unless nothing was ever agreed, so that any state will do."""
        for fragment in self._fragments:
            state = fetch_state(self._client.exchange, fragment.index)
            if state.anchor.any():
                raise UsageError(
                    f"The run has advanced to round {state.round} of fragment "
                    f"{fragment.index}, and no island that is left holds its state. "
                    "Load a checkpoint and its load_state_dict() before the first "
                    "step, or start a new run."
                )


LoadState = Callable[[Any], None]
SaveState = Callable[[], Any]


class StateRegistry:
    """The functions that load and save the state of the training, by key.

    The training thread disallows reads while an inner step changes the weights; a
    reader in another thread waits.
    """

    def __init__(self) -> None:
        self._functions: dict[str, tuple[LoadState, SaveState]] = {}
        self._is_readable = threading.Event()
        self._is_readable.set()

    def register(self, key: str, load: LoadState, save: SaveState) -> None:
        """Remember how to load and save one part of the state."""
        if key in self._functions:
            raise UsageError(
                f"A state is registered as {key!r} already. Choose another key."
            )
        self._functions[key] = (load, save)

    def allow(self) -> None:
        self._is_readable.set()

    def disallow(self) -> None:
        self._is_readable.clear()

    def read(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return every registered state, as soon as it may be read."""
        if not self._is_readable.wait(timeout_s):
            raise UsageError(
                f"The registered state could not be read for {timeout_s:g} s: an inner "
                "step was in progress. Call allow_state_dict_read() after each."
            )
        return {key: save() for key, (_, save) in self._functions.items()}

    def load(self, states: dict[str, Any]) -> None:
        """Load every registered part from `states`.

        Raises:
            CorruptError: `states` has other keys, and nothing has been loaded.
        """
        if states.keys() != self._functions.keys():
            raise CorruptError(
                f"The island that gives its state has registered {sorted(states)}, and "
                f"this one {sorted(self._functions)}. Register the same on both."
            )
        for key, (load, _) in self._functions.items():
            load(states[key])
