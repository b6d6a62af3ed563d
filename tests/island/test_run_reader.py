"""Ranges of a coordinator's file have the requested length."""

from __future__ import annotations

import pytest

from atoll.errors import CorruptError
from atoll.http import Request, Response
from atoll.island.run_reader import RemoteFile
from tests.http.loopback import calling, listening


def test_a_part_of_another_length_is_refused() -> None:
    """A reply that a proxy has shortened is not taken for weights."""

    def short(request: Request) -> Response:
        return Response(status=206, body=b"reef")

    with listening(short) as listener, calling(listener) as caller:
        file = RemoteFile(caller, {}, "/anchor")

        assert file.bytes(0, 4).tobytes() == b"reef"
        with pytest.raises(CorruptError, match=r"8 bytes of /anchor .* and 4 came"):
            file.bytes(0, 8)
