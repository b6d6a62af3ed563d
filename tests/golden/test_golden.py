"""Frames that every later version must still read."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from atoll.wire.codecs import codec
from atoll.wire.digests import state_digest
from atoll.wire.files import read_frame
from atoll.wire.frame import pack
from tests.golden.regenerate import FOLDER, frame_and_listing
from tests.golden.said import said
from tests.golden.vectors import VECTORS

STORED = sorted(path.stem for path in FOLDER.glob("*.atoll"))
PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"


@pytest.mark.parametrize("name", STORED)
def test_a_golden_frame_says_what_its_listing_says(name: str) -> None:
    """Every field and every decoded bit is the stored one."""
    data = (FOLDER / f"{name}.atoll").read_bytes()
    header, body = read_frame(BytesIO(data))

    assert said(header, body) == json.loads((FOLDER / f"{name}.json").read_text())
    assert pack(header) + body.tobytes() == data


@pytest.mark.parametrize("name", STORED)
def test_regenerating_changes_nothing(name: str) -> None:
    """This version writes the bytes that were stored."""
    frame, listing = frame_and_listing(name)

    assert frame == (FOLDER / f"{name}.atoll").read_bytes()
    assert listing == (FOLDER / f"{name}.json").read_text()


def test_every_vector_is_stored_and_on_the_page() -> None:
    """No vector is missing as a file, nor from docs/wire-format.md."""
    page = PAGE.read_text()

    assert sorted(VECTORS) == STORED
    assert [name for name in STORED if f"`{name}`" not in page] == []


def test_the_golden_state_has_the_digest_it_names() -> None:
    """A state's base is the digest of its own body."""
    with (FOLDER / "state-adam.atoll").open("rb") as file:
        header, body = read_frame(file)
    anchor, first, second = np.split(body.view(np.float32), 3)

    assert header.outer is not None
    assert state_digest(anchor, [first, second], header.outer.count) == header.base


def test_tiny_values_decode_to_zero_without_sign() -> None:
    """The special bits decode as the page says, in fp32 and bf16 alike."""
    for name in ("update-fp32", "update-bf16"):
        with (FOLDER / f"{name}.atoll").open("rb") as file:
            header, body = read_frame(file)
        decoded = np.empty(header.elements, dtype=np.float32)
        codec(header.codec).decode(body, decoded)
        bits = [f"{word:08x}" for word in decoded[:18].view(np.uint32)]

        # Zeros, subnormals and the smallest normals are +0; so is 2**-101.
        assert bits[:8] == ["00000000"] * 8
        assert bits[11] == "00000000"
        # 2**-100 itself stays. The value just below it is +0 in fp32, and in bf16 it
        # was rounded up to 2**-100 before.
        assert bits[8:10] == ["0d800000", "8d800000"]
        assert bits[10] == ("00000000" if name == "update-fp32" else "0d800000")
        # Halfway: 1 + 2**-8 to even is 1, 1 + 3 * 2**-8 to even is 1 + 2**-6; just
        # beyond halfway goes up.
        halfway = ["3f808000", "3f818000", "bf808001", "3f807fff"]
        rounded = ["3f800000", "3f820000", "bf810000", "3f800000"]
        assert bits[14:] == (halfway if name == "update-fp32" else rounded)
