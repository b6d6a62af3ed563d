"""Owns bytes that leave the process: frame, codecs, roster, digests.

Does not know the senders, nor rounds.
Start reading at `codecs`, then `frame`.
"""

from atoll.wire.codecs import Codec, codec, codec_by_code
from atoll.wire.digests import (
    PIECE_ELEMENTS,
    STATE_PIECE,
    blake3_digest,
    piece_count,
    piece_digests,
    piece_elements,
    piece_range,
    state_digest,
    state_piece,
    state_root,
)
from atoll.wire.files import read_frame, read_header, read_pieces
from atoll.wire.frame import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    frame_bytes,
    header_length,
    pack,
    unpack,
    update_digest,
    verify_body,
    verify_piece,
    with_body,
)
from atoll.wire.header import (
    MOMENTS,
    FrameKind,
    Header,
    OuterValues,
    TrainingProgress,
    fits_gathered,
)
from atoll.wire.roster import (
    Roster,
    RosterEntry,
    Verdict,
    as_reason,
    pack_roster,
    unpack_roster,
)

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_HEADER_BYTES",
    "MOMENTS",
    "PIECE_ELEMENTS",
    "PREFIX_BYTES",
    "STATE_PIECE",
    "Codec",
    "FrameKind",
    "Header",
    "OuterValues",
    "Roster",
    "RosterEntry",
    "TrainingProgress",
    "Verdict",
    "as_reason",
    "blake3_digest",
    "codec",
    "codec_by_code",
    "fits_gathered",
    "frame_bytes",
    "header_length",
    "pack",
    "pack_roster",
    "piece_count",
    "piece_digests",
    "piece_elements",
    "piece_range",
    "read_frame",
    "read_header",
    "read_pieces",
    "state_digest",
    "state_piece",
    "state_root",
    "unpack",
    "unpack_roster",
    "update_digest",
    "verify_body",
    "verify_piece",
    "with_body",
]
