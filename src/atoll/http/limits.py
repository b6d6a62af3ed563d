"""What a listener bears before it says no."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Every bound of a listener, in one place. All are positive."""

    max_connections: int = 4096
    """Open at once, or fewer where descriptors are scarce; one more is answered 503."""

    max_unverified: int = 512
    """Connections that have not shown a valid token, of all origins together.

    Each costs a descriptor and up to 64 KiB, so 32 MiB. An island shows its token with
    the first request: a thousand that come at once are unverified for milliseconds.
    """

    max_unverified_per_origin: int = 128
    """The same of one IPv4 address or one IPv6 /64: a quarter, so that no single one
    keeps others out, and enough for the islands behind one address that start at once.
    """

    unverified_grace_s: float = 2.0
    """A connection younger than this is closed for want of a token only when half of
    all that may be open have shown none: islands that start together show theirs a
    moment after connecting.
    """

    max_head_bytes: int = 32 * 1024
    """Request line and headers; beyond it 431."""

    max_path_bytes: int = 2048
    """The target before its query; beyond it 414."""

    head_s: float = 10.0
    """From the first byte of a head, or from accepting, to its last byte.

    Also how long an unverified connection may be silent between two requests.
    """

    handshake_s: float = 10.0
    """For all of TLS's handshake."""

    keep_alive_s: float = 300.0
    """How long a connection may be silent between two requests."""

    small_bytes: int = 64 * 1024
    """Bodies up to here are moved by the small pool; larger ones need a lane."""

    small_threads: int = 16
    """Threads that run handlers of small requests."""

    bulk_lanes: int = 32
    """Bulk bodies on their way in at once, and as many on their way out."""

    lanes_per_owner: int = 4
    """Of one island at one origin, each way; the rest of its bodies wait.

    An island moves a fragment or two at a time, so that honest ones never notice.
    """

    lane_grace_s: float = 2.0
    """Over so much waiting a transfer is measured while others wait for its lane."""

    waiting_bytes_per_s: int = 16 * 1024
    """What a transfer must move, for each body that waits for a lane, to keep its own.

    When nobody waits `min_bytes_per_s` is enough.
    """

    max_rises: int = 4
    """More waiting bodies than this do not raise that rate: at 64 KiB/s an island on a
    link of 100 KB/s keeps its lane, however many wait.
    """

    fair_bytes_per_s: int = 2**20
    """Below this rate an origin or owner with two lanes more than a waiting one loses
    its slowest transfer.

    A faster transfer ends soon by itself, and would have to be repeated.
    """

    max_body_bytes: int = 2**34
    """Declared by one request; beyond it 413."""

    max_body_bytes_in_flight: int = 2**33
    """Declared by all bulk requests being read; a larger one is read alone."""

    lane_wait_s: float = 30.0
    """How long a bulk body may wait for its lane; then 503 with Retry-After."""

    idle_s: float = 20.0
    """Between two bytes of a body, either way; also all of a small body."""

    min_bytes_per_s: int = 1024
    """What a body must average once `idle_s` has been spent waiting for it."""

    max_parked_bytes: int = 32 * 2**20
    """Of all small responses waiting for a slow reader: 512 of the largest."""

    drain_bytes: int = 2**20
    """An unread rest up to here is skipped; a longer one closes the connection."""

    linger_s: float = 1.0
    """How long a closed connection still listens, so that its last words arrive."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"{name}={value} must be positive.")
