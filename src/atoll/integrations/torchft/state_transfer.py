"""The state of the training goes from one island to others, through rounds.

An island that joins late, or has fallen behind, publishes refused updates in the open
rounds; their reason is a *request* for the state. All islands read the same roster, so
all of them derive the same donor without a message.

Rule 1: the donor is the first island whose update counted, by name; else the first that
        abstained, for it holds the state too.
Rule 2: if only requesting islands took part, no island holds the state. Rounds of
        fragment 0 then elect the island with the most steps: its state is the run's
        from there.
Rule 3: a request has a number and is served once, however many rosters list it.

The bytes of the state go through a fragment that only states use.

Rule 4: the donor contributes one parcel per round, and every other island publishes a
        refused update, so that no round waits for it.
Rule 5: every update has the number of its transfer, so that an island that comes late
        finds where its transfer began, and skips the others.
Rule 6: a round without a parcel is tried again once: a donor that was late in one round
        gets the next. After two, the donor has left, and every island continues.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.distributed.tensor import DTensor

from atoll.errors import CorruptError, UsageError
from atoll.exchange import Frame, Outcome
from atoll.integrations.torchft.fragment import ABSTAINS, RoundClient, roster_of
from atoll.island.entry import fetch_state
from atoll.weights import FragmentLayout, FragmentState, Terms, seal, terms_of
from atoll.weights.layout import F32
from atoll.wire import Header, RosterEntry, Verdict, blake3_digest, codec, with_body

REQUESTS = "torchft: wants the state"
"""The reason of a refused update that requests the state."""

STANDS_BY = "torchft: another island gives its state"
"""The reason of a refused update during the transfer of another island."""

MAX_EMPTY_ROUNDS = 2
"""This many rounds without a parcel end a transfer."""

Incarnation = tuple[str, int]
"""An island and the number of its incarnation."""

Served = dict[str, tuple[int, int]]
"""By island, the incarnation and the number of the request that was served last."""


@dataclass(frozen=True)
class StateTransfer:
    """One island gives its state to those that request it."""

    number: int
    """Different for every round that calls for one."""

    donor: Incarnation
    donor_has_state: bool
    """False: no island reports that it has trained in this run."""

    requests: tuple[RosterEntry, ...]


def transfer_of(agreed: Header, *, num_fragments: int) -> StateTransfer | None:
    """Return the transfer that a round's roster calls for, served or not."""
    roster = roster_of(agreed)
    requests = tuple(entry for entry in roster.entries if is_request(entry))
    if not requests:
        return None
    number = agreed.round * num_fragments + agreed.fragment
    holders = [*roster.counted, *filter(_abstains, roster.entries)]
    if holders:
        return StateTransfer(number, _incarnation(holders[0]), True, requests)
    if not is_election(agreed):
        return None
    donor = max(requests, key=lambda entry: entry.inner_steps)
    return StateTransfer(number, _incarnation(donor), donor.inner_steps > 0, requests)


def is_election(agreed: Header) -> bool:
    """Return whether a round has found that no island holds the state."""
    entries = roster_of(agreed).entries
    took_part = [entry for entry in entries if entry.verdict is not Verdict.LATE]
    return agreed.fragment == 0 and bool(took_part) and all(map(is_request, took_part))


def is_unserved(transfer: StateTransfer, served: Served) -> bool:
    """Return whether a transfer has a request that was not served yet."""
    return any(
        (entry.incarnation, entry.tokens) > served.get(entry.island, (0, 0))
        for entry in transfer.requests
    )


def serve(transfer: StateTransfer, served: Served) -> None:
    """Mark all requests of a transfer as served."""
    for entry in transfer.requests:
        before = served.get(entry.island, (0, 0))
        served[entry.island] = max(before, (entry.incarnation, entry.tokens))


def is_request(entry: RosterEntry) -> bool:
    """Return whether an island requested the state in a round."""
    return entry.verdict is Verdict.REFUSED and entry.reason == REQUESTS


def _abstains(entry: RosterEntry) -> bool:
    return entry.verdict is Verdict.REFUSED and entry.reason == ABSTAINS


def _incarnation(entry: RosterEntry) -> Incarnation:
    return entry.island, entry.incarnation


@dataclass
class StateChannel:
    """The fragment that carries states, as one island follows it."""

    client: RoundClient
    index: int
    layout: FragmentLayout
    round: int
    """The next round of it whose outcome this island has not seen."""

    @property
    def max_bytes(self) -> int:
        """The largest state that is sent or received."""
        return self.client.joined.settings.limits.max_body_bytes

    @property
    def _terms(self) -> Terms:
        return terms_of(self.layout, self.client.joined.settings)

    def send(self, data: bytes, *, transfer: int) -> None:
        """Send a state. Afterwards every island that took part has it, or has left."""
        parcels = split(data, elements=self.layout.elements, max_bytes=self.max_bytes)
        state = self._begin()
        self.round, missed = state.round + 1, 0
        while parcels and missed < MAX_EMPTY_ROUNDS:
            remaining = len(parcels) - 1
            frame = self._frame(parcels[0], state.digest, transfer, remaining)
            self.client.publish(frame)
            outcome = self.client.outcome(self.index, self.round)
            self._follow(state, outcome)
            self.round += 1
            missed += 1
            if outcome.agreed.header.elements:
                parcels.pop(0)
                missed = 0

    def stand_by(self, *, transfer: int) -> None:
        """Publish refused updates until a transfer between other islands is over."""
        state, missed = self._begin(), 0
        while missed < MAX_EMPTY_ROUNDS:
            agreed = self._next(state, transfer).agreed.header
            if _number_of(agreed) != transfer:
                continue
            missed = 0 if agreed.elements else missed + 1
            if agreed.elements and _remaining(agreed) == 0:
                return

    def receive(self, *, transfer: int) -> bytes | None:
        """Return the state that the donor sends; None if it left before the end."""
        reader, missed = ParcelReader(max_bytes=self.max_bytes), 0
        state = self._begin()
        while missed < MAX_EMPTY_ROUNDS:
            outcome = self._next(state, transfer)
            agreed = outcome.agreed.header
            if _number_of(agreed) != transfer:
                continue
            if not agreed.elements:
                missed += 1
                continue
            missed = 0
            if not outcome.has_body:
                return None  # too late: the run no longer keeps one of the parcels
            reader.add(self._parcel(outcome))
            if _remaining(agreed) == 0:
                return reader.data()
        return None

    def _begin(self) -> FragmentState:
        """Return the run's state of the fragment: its holder can close a round."""
        state = fetch_state(self.client.exchange, self.index)
        self.client.hold(self.index, state)
        return state

    def _next(self, state: FragmentState, transfer: int) -> Outcome:
        """Return the outcome of the next round, and take part in it if it is open."""
        outcome = self.client.look(self.index, self.round)
        if outcome is None:
            self.client.refuse(self.index, self.round, STANDS_BY, inner_steps=transfer)
            outcome = self.client.outcome(self.index, self.round)
        self._follow(state, outcome)
        self.round += 1
        return outcome

    def _follow(self, state: FragmentState, outcome: Outcome) -> None:
        """Apply an outcome to the state, unless the state has it already."""
        agreed = outcome.agreed.header
        if agreed.round != state.round + 1 or not outcome.has_body:
            return
        state.apply(agreed, outcome.agreed.body)
        self.client.hold(self.index, state)
        self.client.bring(outcome.position, self.index, state, self._terms)

    def _frame(self, parcel: F32, base: bytes, transfer: int, remaining: int) -> Frame:
        body = np.empty(parcel.nbytes, np.uint8)
        up = self._terms.up
        norm = seal(self.layout, None, parcel, body, up=up)
        header = self.client.header(
            self.index,
            self.round,
            inner_steps=transfer,
            tokens=remaining,
            base=base,
            codec=up.name,
            elements=self.layout.elements,
            norm=norm,
        )
        return Frame(with_body(header, body), body)

    def _parcel(self, outcome: Outcome) -> F32:
        agreed = outcome.agreed.header
        if agreed.elements != self.layout.elements:
            raise CorruptError(
                f"A parcel of {agreed.elements} elements came, and parcels have "
                f"{self.layout.elements}. Ask for the state again."
            )
        parcel = np.empty(agreed.elements, np.float32)
        codec(agreed.codec).decode(outcome.agreed.body, parcel)
        return parcel


def _number_of(agreed: Header) -> int:
    """Return the transfer that a round belongs to: that of its donor, if it had one."""
    roster = roster_of(agreed)
    entries = roster.counted or roster.entries
    return max(entry.inner_steps for entry in entries)


def _remaining(agreed: Header) -> int:
    (entry,) = roster_of(agreed).counted
    return entry.tokens


# Parcels: bytes of any length as vectors of one length, exact through fp32 and back.
#
# A parcel carries three bytes per element, as a whole number below 2**24: fp32 holds it
# exactly, no rule about small numbers touches it, and the mean of one is itself. The
# first element is ballast: it outweighs the rest, so that all parcels have the same
# norm and the outlier check of norms accepts any bytes.
#
# The first bytes of the first parcel are the length and the BLAKE3 digest of all.

BALLAST = np.float32(2.0**48)
"""Far above 2**24 times the root of any length, and below the largest norm that counts.
"""
_HEAD = struct.Struct("<Q32s")
_PER_ELEMENT = 3
_LIMIT = 2**24


def parcel_bytes(elements: int) -> int:
    """Return the number of bytes that a parcel of `elements` elements carries."""
    return (elements - 1) * _PER_ELEMENT


def split(data: bytes, *, elements: int, max_bytes: int) -> list[F32]:
    """Return the parcels of `data`, in order.

    Raises:
        UsageError: `data` is larger than an island accepts.
    """
    if len(data) > max_bytes:
        raise UsageError(
            f"The registered state has {len(data)} bytes, and limits.max_body_bytes="
            f"{max_bytes}. Register less, or raise the limit of the run."
        )
    stream = _HEAD.pack(len(data), blake3_digest(data)) + data
    size = parcel_bytes(elements)
    return [
        _vector(stream[first : first + size], elements)
        for first in range(0, len(stream), size)
    ]


class ParcelReader:
    """Joins parcels in the order they come, up to the length that the first states."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def add(self, parcel: F32) -> None:
        """Append the bytes of the next parcel.

        Raises:
            CorruptError: it is no parcel, or one more than the first one stated.
        """
        values = parcel[1:]
        is_whole = (values >= 0) & (values < _LIMIT) & (values == np.trunc(values))
        if parcel[0] != BALLAST or not is_whole.all():
            raise CorruptError(
                "An island's state came in a parcel that holds no bytes. "
                "Ask for the state again."
            )
        if self._data and len(self._data) >= self._promised():
            raise CorruptError(
                f"An island's state continues after its {self._promised()} bytes. "
                "Ask for the state again."
            )
        self._data += _bytes_of(values)
        if self._promised() > self._max_bytes + _HEAD.size:
            raise CorruptError(
                f"An island's state promises {self._promised()} bytes, and "
                f"limits.max_body_bytes={self._max_bytes}. Register less on every "
                "island, or raise the limit of the run."
            )

    def data(self) -> bytes:
        """Return all bytes, verified.

        Raises:
            CorruptError: the bytes do not have the stated length and digest.
        """
        size, digest = _HEAD.unpack_from(self._data) if self._data else (1, b"")
        data = bytes(self._data[_HEAD.size : _HEAD.size + size])
        if len(data) != size or blake3_digest(data) != digest:
            raise CorruptError(
                f"An island's state of {size} bytes came with {len(data)} that do not "
                "have its digest. Ask for the state again."
            )
        return data

    def _promised(self) -> int:
        return int(_HEAD.unpack_from(self._data)[0]) + _HEAD.size


def _vector(data: bytes, elements: int) -> F32:
    padded = np.zeros((elements - 1, _PER_ELEMENT), np.uint8)
    padded.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
    parts = padded.astype(np.uint32)
    vector = np.empty(elements, np.float32)
    vector[0] = BALLAST
    vector[1:] = parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16
    return vector


def _bytes_of(values: F32) -> bytes:
    octets = values.astype("<u4").view(np.uint8).reshape(-1, 4)
    return octets[:, :_PER_ELEMENT].tobytes()


@dataclass(frozen=True)
class TransferredState:
    """All that an island needs to continue where another is."""

    registered: dict[str, Any]
    """The registered states, of torchft and of its user, by key."""

    step: int
    batches_committed: int
    rounds: list[int]
    """Of each fragment, the last round that is in the weights."""

    served: Served

    def packed(self) -> bytes:
        """Return the state as bytes.

        Raises:
            UsageError: a registered state holds an unsupported value.
        """
        return pack_tree(
            {
                "user": self.registered,
                "step": self.step,
                "batches_committed": self.batches_committed,
                "rounds": self.rounds,
                "served": {name: list(key) for name, key in self.served.items()},
            }
        )

    @classmethod
    def of(cls, data: bytes, *, num_fragments: int) -> TransferredState:
        """Return the state that another island has packed.

        Raises:
            CorruptError: the bytes hold none, or one of another number of fragments.
        """
        tree = unpack_tree(data)
        try:
            state = cls(
                registered=dict(tree["user"]),
                step=int(tree["step"]),
                batches_committed=int(tree["batches_committed"]),
                rounds=[int(round) for round in tree["rounds"]],
                served={
                    str(name): (key[0], key[1]) for name, key in tree["served"].items()
                },
            )
            if len(state.rounds) != num_fragments:
                raise ValueError(f"{len(state.rounds)} rounds for {num_fragments}")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
            raise CorruptError(
                f"The state that another island sent is incomplete: {exc!r}. "
                "Start both islands with the same release."
            ) from exc
        return state


# Trees: the registered state as bytes and back, tensors as safetensors, the rest JSON.
#
# Reading executes nothing: no pickle, and no class is looked up by name. The bytes are
# hostile: their digest was verified before, and their content is still bounded and
# checked. A value that cannot be carried exactly is refused by its path.
#
# JSON holds the shape of the tree; a list there is [tag, value, ...], and anything else
# is a value. Keys of dictionaries may be numbers, as in the state of an optimizer.

TREE = "tree"
MAX_DEPTH = 64
_SCALARS = (str, int, float, bool, type(None))
_NO_TREE = (
    SafetensorError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    RecursionError,
)
"""All that reading bytes of another kind can raise."""


def pack_tree(tree: object) -> bytes:
    """Return a tree of dictionaries, lists, tuples, tensors and plain values as bytes.

    Raises:
        UsageError: a value in it is not supported. The message has its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    shape = json.dumps(_shape_of(tree, tensors, "state")).encode()
    shape_bytes = torch.frombuffer(bytearray(shape), dtype=torch.uint8)
    return save({TREE: shape_bytes, **tensors})


def unpack_tree(data: bytes) -> Any:
    """Return the tree that `pack_tree` packed into `data`.

    Raises:
        CorruptError: `data` is not from `pack_tree`.
    """
    try:
        tensors = load(data)
        shape = json.loads(tensors.pop(TREE).numpy().tobytes())
        return _tree_of(shape, tensors, 0)
    except _NO_TREE as exc:
        raise CorruptError(
            f"A state of {len(data)} bytes cannot be unpacked: {exc!r}. Start both "
            "islands with the same release."
        ) from exc


def _shape_of(value: object, tensors: dict[str, torch.Tensor], path: str) -> object:
    if path.count("/") > MAX_DEPTH:
        raise _unsupported(path, f"is more than {MAX_DEPTH} levels deep")

    def inner(key: object, item: object) -> object:
        return _shape_of(item, tensors, f"{path}/{key}")

    match value:
        case DTensor():
            raise _unsupported(path, "is sharded over several processes")
        case torch.Tensor():
            tensors[str(len(tensors))] = value.detach().cpu().contiguous().clone()
            return ["tensor", str(len(tensors) - 1)]
        case dict():
            for key in value:
                if type(key) not in (str, int):
                    raise _unsupported(path, f"has the key {key!r}, no text or number")
            pairs = [[key, inner(key, item)] for key, item in value.items()]
            return ["dict", *pairs]
        case list():
            return ["list", *(inner(index, item) for index, item in enumerate(value))]
        case tuple():
            return ["tuple", *(inner(index, item) for index, item in enumerate(value))]
    if type(value) in _SCALARS:
        return value
    raise _unsupported(path, f"is a {type(value).__name__}")


def _tree_of(shape: Any, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    if not isinstance(shape, list):
        if type(shape) not in _SCALARS:
            raise ValueError(f"a {type(shape).__name__} where a value belongs")
        return shape
    tag, *rest = shape
    if tag == "tensor":
        return tensors[rest[0]]
    if tag == "dict":
        return {key: _tree_of(item, tensors, depth + 1) for key, item in rest}
    items = [_tree_of(item, tensors, depth + 1) for item in rest]
    if tag == "tuple":
        return tuple(items)
    if tag == "list":
        return items
    raise ValueError(f"the unknown tag {tag!r}")


def _unsupported(path: str, fact: str) -> UsageError:
    return UsageError(
        f"{path!r} of the registered state {fact}, and cannot be given to another "
        "island. Register a state dict of tensors, numbers, text, lists and "
        "dictionaries."
    )
