"""What islands bring that have reduced a round among themselves, in one body.

The headers of their updates, without bodies; then, if they have agreed, the agreed
frame and a voucher of each of them, in the same order.
"""

from __future__ import annotations

from atoll.errors import UsageError
from atoll.exchange.base import Frame
from atoll.exchange.calls import AgreedCall
from atoll.exchange.forms.frames import Incoming, buffers_of
from atoll.exchange.forms.heads import Asked
from atoll.wire import Header, Kind, pack
from atoll.wire.digests import Bytes, view_of
from atoll.wire.voucher import VOUCHER_BYTES

MAX_GATHERED = 4096
"""Islands of one collective."""


def gathered_parts(call: AgreedCall) -> tuple[Bytes, ...]:
    """Return the body of a call, without a copy of the agreed frame's."""
    heads = tuple(pack(each) for each in call.updates)
    if call.agreed is None:
        return heads
    return (*heads, *buffers_of(call.agreed), *call.vouchers)


def read_gathered(asked: Asked, body: Incoming) -> AgreedCall:
    """Return the call that such a body makes.

    Raises:
        UsageError: it has too few or too many headers, or they belong elsewhere.
        CorruptError: a header is wrong, or the body is longer than what it holds.
    """
    updates: list[Header] = []
    agreed: Frame | None = None
    vouchers: tuple[bytes, ...] = ()
    while body.left_bytes and agreed is None:
        header = body.header()
        _require_place(asked, header)
        if header.kind is Kind.AGREED and updates:
            agreed = Frame(header, body.body(header))
            vouchers = _vouchers(body, len(updates))
        else:
            _require_update(header, len(updates))
            updates.append(header)
    if not updates:
        raise UsageError("No update is brought. Bring the header of at least one.")
    who = asked.island, asked.incarnation
    return AgreedCall(*who, tuple(updates), agreed, vouchers)


def _vouchers(body: Incoming, count: int) -> tuple[bytes, ...]:
    said = view_of(body.take(count * VOUCHER_BYTES)).tobytes()
    starts = range(0, len(said), VOUCHER_BYTES)
    return tuple(said[start : start + VOUCHER_BYTES] for start in starts)


def _require_place(asked: Asked, header: Header) -> None:
    here, said = (asked.fragment, asked.round), (header.fragment, header.round)
    if said != here:
        raise UsageError(
            f"The {header.name} does not belong to fragment {here[0]}, round "
            f"{here[1]}, as the path says. Send it to its own path."
        )


def _require_update(header: Header, before: int) -> None:
    if header.kind is not Kind.UPDATE:
        raise UsageError(
            f"The {header.name} stands where the header of an update must. "
            "Bring the updates' headers, then the agreed frame."
        )
    if before == MAX_GATHERED:
        raise UsageError(
            f"More than {MAX_GATHERED} updates come together. "
            "Let fewer islands share a collective."
        )
