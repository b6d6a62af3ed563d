"""A link between real sockets: lower bounds of time, exact bytes, and every fault.

No test asks for an upper bound of time: a machine may always be slower.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from atoll.errors import UsageError
from atoll.testing import Link

SILENCE_S = 0.2
"""Bytes that may not come would come within this, or the test misses a fault."""


@contextmanager
def linked(
    rate: float | tuple[float | None, float | None] | None = None,
    **options: float,
) -> Iterator[tuple[Link, socket.socket]]:
    """Yield a link and the listener that it leads to."""
    with (
        socket.create_server(("127.0.0.1", 0)) as target,
        Link(target.getsockname(), rate_bytes_per_s=rate, **options) as link,  # type: ignore[arg-type]
    ):
        target.settimeout(30)
        yield link, target


@contextmanager
def call(
    link: Link, target: socket.socket
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of one connection through a link."""
    with socket.create_connection(link.address, timeout=30) as caller:
        called, _ = target.accept()
        called.settimeout(30)
        with called:
            yield caller, called


def read(sock: socket.socket, size: int = -1) -> bytes:
    """Read so many bytes, or to the end of the stream."""
    with sock.makefile("rb") as file:
        return file.read(size)


def sending(sock: socket.socket, data: bytes) -> threading.Thread:
    """Send in the background, then end the stream."""

    def send() -> None:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def is_silent(sock: socket.socket) -> bool:
    """Say whether nothing comes, neither bytes nor an end."""
    sock.settimeout(SILENCE_S)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(30)
    return False


def test_bytes_arrive_as_they_were_sent_in_both_directions() -> None:
    """Under rate, delay and jitter a stream is the same stream, and is counted."""
    up, down = random.Random(1).randbytes(300_000), random.Random(2).randbytes(200_000)
    with (
        linked(3e6, delay_s=0.01, jitter_s=0.01) as (link, target),
        call(link, target) as (caller, called),
    ):
        threads = sending(caller, up), sending(called, down)

        assert read(called) == up
        assert read(caller) == down
        for thread in threads:
            thread.join()
        assert (link.bytes_up, link.bytes_down) == (len(up), len(down))


def test_no_transfer_is_faster_than_rate_and_delay() -> None:
    """250 KB at 1 MB/s and 50 ms take at least 0.3 s."""
    with (
        linked(1e6, delay_s=0.05) as (link, target),
        call(link, target) as (caller, called),
    ):
        begun_s = time.monotonic()
        thread = sending(caller, bytes(250_000))
        read(called)

        assert time.monotonic() - begun_s >= 0.3
        thread.join()


def test_all_connections_share_the_rate() -> None:
    """Four times 50 KB at 1 MB/s take 0.2 s, as 200 KB do."""
    with linked(1e6) as (link, target), ExitStack() as stack:
        calls = [stack.enter_context(call(link, target)) for _ in range(4)]
        begun_s = time.monotonic()
        threads = [sending(caller, bytes(50_000)) for caller, _ in calls]

        for _, called in calls:
            assert len(read(called)) == 50_000
        assert time.monotonic() - begun_s >= 0.2
        for thread in threads:
            thread.join()


def test_each_direction_has_its_own_rate() -> None:
    """With 100 KB/s down and no limit up, 20 KB back take 0.2 s."""
    with (
        linked((None, 1e5)) as (link, target),
        call(link, target) as (caller, called),
    ):
        begun_s = time.monotonic()
        caller.sendall(bytes(2_000_000))
        read(called, 2_000_000)
        called.sendall(bytes(20_000))
        read(caller, 20_000)

        assert time.monotonic() - begun_s >= 0.2


def test_a_question_and_its_answer_take_the_delay_twice() -> None:
    """With 50 ms each way, nobody is answered before 0.1 s."""
    with linked(delay_s=0.05) as (link, target), call(link, target) as (caller, called):
        begun_s = time.monotonic()
        caller.sendall(b"?")
        read(called, 1)
        called.sendall(b"!")
        read(caller, 1)

        assert time.monotonic() - begun_s >= 0.1


def test_a_sender_feels_that_nobody_receives() -> None:
    """With a receiver that reads nothing, a sender without end is stopped."""
    with linked() as (link, target), call(link, target) as (caller, _):
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        caller.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            caller.sendall(bytes(2**26))


def test_a_receiver_that_reads_nothing_holds_up_nobody_else() -> None:
    """Its own stream stands still; another one on the same line goes on."""
    with linked(2e7) as (link, target), call(link, target) as (stuck, _):
        stuck.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            stuck.sendall(bytes(2**26))
        with call(link, target) as (caller, called):
            caller.sendall(b"hello")

            assert read(called, 5) == b"hello"


def test_the_end_of_a_stream_is_carried_and_the_other_direction_stays_open() -> None:
    """Who has ended its own stream still gets the answer."""
    with linked(delay_s=0.01) as (link, target), call(link, target) as (caller, called):
        caller.sendall(b"all of it")
        caller.shutdown(socket.SHUT_WR)

        assert read(called) == b"all of it"
        called.sendall(b"thanks")
        called.shutdown(socket.SHUT_WR)
        assert read(caller) == b"thanks"


def test_a_cut_is_silent_and_a_mended_line_goes_on() -> None:
    """Nothing comes during a cut, not even an end; afterwards everything does."""
    with linked() as (link, target), call(link, target) as (caller, called):
        link.cut()
        caller.sendall(b"held")
        caller.shutdown(socket.SHUT_WR)

        assert is_silent(called)
        link.mend()
        assert read(called) == b"held"


def test_who_connects_during_a_cut_waits_for_its_end() -> None:
    """The target sees the call, and its bytes, when the line is mended."""
    with linked() as (link, target):
        link.cut()
        with socket.create_connection(link.address, timeout=30) as caller:
            caller.sendall(b"hello")
            assert is_silent(caller)
            link.mend()
            called, _ = target.accept()
            with called:
                assert read(called, 5) == b"hello"


def test_who_gives_up_during_a_cut_never_reaches_the_target() -> None:
    """The first call that comes after the cut is of somebody who stayed."""
    with linked() as (link, target):
        link.cut()
        with socket.create_connection(link.address) as gone:
            gone.sendall(b"gone")
        with socket.create_connection(link.address, timeout=30) as stays:
            stays.sendall(b"here")
            link.mend()
            called, _ = target.accept()
            with called:
                assert read(called, 4) == b"here"


def test_a_reset_breaks_both_sides_and_new_calls_are_carried() -> None:
    """Both get the error of a broken connection; the next one works."""
    with linked() as (link, target):
        with call(link, target) as (caller, called):
            link.reset()
            for sock in (caller, called):
                with pytest.raises(ConnectionResetError):
                    sock.recv(1)
        with call(link, target) as (caller, called):
            caller.sendall(b"again")
            assert read(called, 5) == b"again"


@pytest.mark.parametrize("size", [0, 1, 70_000, 299_999])
def test_an_upload_is_cut_after_exactly_so_many_bytes(size: int) -> None:
    """The receiver gets these bytes and an end, the sender a broken connection."""
    data = random.Random(3).randbytes(300_000)
    with linked() as (link, target), call(link, target) as (caller, called):
        link.close_after(size)
        caller.sendall(data)

        assert read(called) == data[:size]
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            caller.recv(1)
        assert link.bytes_up == size


def test_bytes_from_before_do_not_count() -> None:
    """On a connection that has carried something, counting begins with the call."""
    with linked() as (link, target), call(link, target) as (caller, called):
        caller.sendall(b"before")
        assert read(called, 6) == b"before"
        link.close_after(3)
        caller.sendall(b"after")

        assert read(called) == b"aft"


def test_a_reply_can_be_lost_with_its_connection_once() -> None:
    """The request arrives, its reply does not, and the next call is whole."""
    with linked() as (link, target):
        link.close_after(0, direction="down")
        for reply in (b"", b"done"):
            with call(link, target) as (caller, called):
                caller.sendall(b"do it")
                assert read(called, 5) == b"do it"
                called.sendall(b"done")
                with suppress(OSError):  # the first may be cut off already
                    called.shutdown(socket.SHUT_WR)
                assert read(caller) == reply


def test_lost_replies_are_swallowed_and_their_streams_end_with_the_mending() -> None:
    """Requests arrive meanwhile; a stream with a hole is reset, not continued."""
    with linked() as (link, target):
        with call(link, target) as (caller, called):
            link.lose_replies()
            caller.sendall(b"?")
            assert read(called, 1) == b"?"
            called.sendall(b"answer")
            assert link.wait_carried(6, direction="down")
            assert is_silent(caller)
            assert (link.bytes_down, link.bytes_lost) == (0, 6)
            link.mend()
            with pytest.raises(ConnectionResetError):
                caller.recv(1)
        with call(link, target) as (caller, called):
            called.sendall(b"answer")
            assert read(caller, 6) == b"answer"


def test_a_side_that_dies_is_noticed_by_the_other() -> None:
    """A broken connection travels along the line as bytes do."""
    with linked(delay_s=0.01) as (link, target), call(link, target) as (caller, called):
        called.sendall(b"unread")
        assert link.wait_carried(6, direction="down")
        caller.close()  # with bytes unread: a reset
        with pytest.raises(ConnectionResetError):
            called.recv(1)


def test_a_target_that_does_not_listen_breaks_the_call() -> None:
    """The link listens all the same, and carries as soon as the target listens."""

    def ask(link: Link) -> None:
        with socket.create_connection(link.address, timeout=30) as caller:
            caller.recv(1)

    with socket.socket() as target:
        target.bind(("127.0.0.1", 0))
        with Link(target.getsockname()) as link:
            with pytest.raises(ConnectionResetError):
                ask(link)
            target.listen()
            with call(link, target) as (caller, called):
                caller.sendall(b"back")
                assert read(called, 4) == b"back"


def test_many_calls_need_one_thread() -> None:
    """Fifty connections at once add one thread, and none is left at the end."""
    before = threading.active_count()
    with linked() as (link, target):
        callers = [socket.create_connection(link.address) for _ in range(50)]
        called = [target.accept()[0] for _ in callers]
        assert threading.active_count() == before + 1
        for sock in callers + called:
            sock.close()

    assert threading.active_count() == before


def test_waiting_for_bytes_that_do_not_come_ends() -> None:
    """The answer is no."""
    with linked() as (link, _):
        assert not link.wait_carried(1, timeout_s=0.01)


def test_a_closed_link_says_so() -> None:
    """Closing twice is allowed; cutting what is closed is not."""
    with linked() as (link, _):
        link.close()
        link.close()
        with pytest.raises(
            UsageError, match=r"This link is closed\. Create a new one\."
        ):
            link.cut()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate_bytes_per_s": 0}, "rate_bytes_per_s=0 must be positive and finite"),
        ({"rate_bytes_per_s": (1.0, -2.0)}, r"rate_bytes_per_s=-2.0 must be positive"),
        ({"delay_s": -1}, "delay_s=-1 must be finite and at least 0"),
        ({"jitter_s": float("inf")}, "jitter_s=inf must be finite"),
        ({"buffer_bytes": 0}, "buffer_bytes=0 must be at least 1"),
    ],
)
def test_impossible_lines_are_refused(options: dict[str, float], message: str) -> None:
    """The message has the value and its bound."""
    with pytest.raises(UsageError, match=message):
        Link(("127.0.0.1", 1), **options)  # type: ignore[arg-type]


def test_impossible_faults_are_refused() -> None:
    """A direction has two names, and bytes are counted from zero."""
    with linked() as (link, _):
        with pytest.raises(UsageError, match='direction="back" must be "up" or "down"'):
            link.close_after(1, direction="back")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"close_after\(-1\) must be at least 0"):
            link.close_after(-1)
