"""`python -m tests.golden.regenerate`: write the golden frames anew.

Only for a new vector or a new version of the format: old frames must stay readable.
"""

from __future__ import annotations

import json
from pathlib import Path

from atoll.wire.frame import pack
from tests.golden.said import said
from tests.golden.vectors import VECTORS

FOLDER = Path(__file__).parent


def frame_and_listing(name: str) -> tuple[bytes, str]:
    """Return the bytes of a golden frame, and what they say."""
    header, body = VECTORS[name]()
    listing = json.dumps(said(header, body), indent=1, ensure_ascii=False)
    return pack(header) + body.tobytes(), listing + "\n"


def regenerate() -> None:
    """Write every vector beside this file."""
    for name in VECTORS:
        frame, listing = frame_and_listing(name)
        (FOLDER / f"{name}.atoll").write_bytes(frame)
        (FOLDER / f"{name}.json").write_text(listing)


if __name__ == "__main__":
    regenerate()
