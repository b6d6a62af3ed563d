"""`atoll inspect`, and the command line around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll import __version__
from atoll.cli import VERBS, main
from atoll.errors import (
    AtollError,
    CorruptError,
    LeaseLost,
    ModelError,
    NonFinite,
    Refused,
    RemoteError,
    SettingsError,
    Unreachable,
    UsageError,
    exit_code,
)
from atoll.wire.digests import PIECE_ELEMENTS, blake3_digest
from atoll.wire.frame import pack, update_digest
from tests.wire.samples import an_update, body_of, sealed

GOLDEN = Path(__file__).parents[1] / "golden"
HELP = Path(__file__).parent / "help.txt"


def atoll(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from atoll.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
    )


def run(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str, str]:
    """Run the command line here; return its exit status and what it said."""
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def write_update(path: Path, **changes: object) -> None:
    """Write an update of zeros."""
    header = sealed(an_update(**changes))
    path.write_bytes(pack(header) + bytes(body_of(header.codec, header.elements)))


def test_an_update_is_listed_and_verified(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Everything that the header says is there, and the last line is the verdict."""
    write_update(tmp_path / "update.atoll")
    header = sealed(an_update())
    status, out, err = run(capsys, "inspect", tmp_path / "update.atoll")

    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "update frame of island 'tokyo-1' (fragment 2, round 7)",
        "  run          lagoon",
        "  fragment     2",
        "  round        7",
        "  island       tokyo-1, incarnation 3",
        "  epoch        1",
        "  base         000102030405060708090a0b0c0d0e0f",
        "  codec        bf16, seed 0",
        "  elements     5",
        f"  bytes        {len(pack(header))} header, 10 body",
        "  norm         1.25",
        "  weight       9",
        "  progress     700 inner steps, 5000 tokens, 6 bytes of cursor",
        f"  digest       {update_digest(header).hex()}",
        "verified: 10 bytes of body in 1 piece",
    ]


def test_an_outcome_shows_its_roster(capsys: pytest.CaptureFixture[str]) -> None:
    """The roster is a table, and the outer values read as they were set."""
    status, out, _ = run(capsys, "inspect", GOLDEN / "agreed-three-verdicts.atoll")
    lines = out.splitlines()

    assert status == 0
    assert "  outer        nesterov, lr 0.7, momentum 0.9, count 0" in lines
    table = [line.split() for line in lines[lines.index("  roster of 3") + 2 : -1]]
    assert [row[0] for row in table] == ["Akureyri", "tokyo-1", "ålesund"]
    assert [row[2] for row in table] == ["late", "counted", "refused:"]


def test_an_asynchronous_outcome_shows_its_share_and_ages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The share of the mean, the buffer and the age of each update are listed."""
    _, out, _ = run(capsys, "inspect", GOLDEN / "agreed-tails.atoll")
    lines = out.splitlines()

    assert "  share        0.375 of the mean, buffer 8" in lines
    table = [line.split() for line in lines[lines.index("  roster of 4") + 1 : -1]]
    assert [row[-1] for row in table] == ["age", "14", "0", "1", "0"]


def test_a_gathered_outcome_says_how_it_becomes_the_mean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its bodies are those of the counted updates, and each piece is verified."""
    _, out, _ = run(capsys, "inspect", GOLDEN / "agreed-gather.atoll")
    _, facts, _ = run(capsys, "inspect", GOLDEN / "agreed-gather.atoll", "--json")
    lines = out.splitlines()

    assert "  gathered     3 updates, merge mean" in lines
    # 589 elements of e3m0: 9 blocks of 33 bytes, and one of 13 elements in 8.
    assert lines[-1] == "verified: 915 bytes of body in 3 pieces"
    assert json.loads(facts)["gathered"] == "mean"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.atoll")), ids=lambda p: p.stem)
def test_every_golden_frame_is_verified(
    capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    """Both ways of printing read every kind of frame, and agree on the verdict."""
    listing = json.loads(path.with_suffix(".json").read_text())
    text_status, text, _ = run(capsys, "inspect", path)
    status, out, err = run(capsys, "inspect", path, "--json")
    facts = json.loads(out)

    assert (text_status, status, err) == (0, 0, "")
    assert "verified" in text.splitlines()[-1]
    assert facts["verified"] is True
    same = ("kind", "run", "island", "refused", "base", "elements", "pieces", "weight")
    assert [facts[key] for key in same] == [listing[key] for key in same]


def test_a_wrong_byte_of_the_body_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The header is still shown; the piece that is wrong is on standard error."""
    path = tmp_path / "update.atoll"
    write_update(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status, out, err = run(capsys, "inspect", path)

    assert status == 5
    assert "  run          lagoon" in out.splitlines()
    assert "verified" not in out
    assert err.startswith("atoll: piece 0 of the update frame of island 'tokyo-1'")

    status, out, err = run(capsys, "inspect", "--json", path)
    facts = json.loads(out)

    assert status == 5
    assert (facts["verified"], facts["run"]) == (False, "lagoon")
    assert err == f"atoll: {facts['problem']}\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are too few for a frame, which has at least 24"),
        (b"safetensors" * 10, "start with b'safe' instead of b'ATOL'"),
        (pack(sealed(an_update()))[:100], "the header has 100 bytes, but says that"),
        (pack(sealed(an_update())) + bytes(9), "has 9 bytes instead of 10"),
        (pack(sealed(an_update())) + bytes(11), "bytes follow the body"),
    ],
)
def test_a_file_that_is_no_frame_is_corrupt(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: bytes, message: str
) -> None:
    """Whatever is wrong is one sentence on standard error, and status 5."""
    path = tmp_path / "file"
    path.write_bytes(data)
    status, _, err = run(capsys, "inspect", path)

    assert status == 5
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_file_that_is_not_there_is_misuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A missing file, an empty folder and a missing argument exit with status 2."""
    status, out, err = run(capsys, "inspect", tmp_path / "gone")
    assert (status, out) == (2, "")
    assert err.startswith(f"atoll: cannot read {tmp_path}/gone: No such file")

    status, _, err = run(capsys, "inspect", tmp_path)
    assert status == 2
    assert "nothing to put into a bundle" in err
    assert run(capsys, "inspect")[0] == 2
    assert run(capsys, "inspekt")[0] == 2


def test_errors_leave_no_traceback(tmp_path: Path) -> None:
    """The shell sees the status and one line, and no colour without a terminal."""
    (tmp_path / "file").write_bytes(b"ATOL" + bytes(100))
    corrupt = atoll("inspect", tmp_path / "file")
    assert corrupt.returncode == 5
    assert corrupt.stderr.count("\n") == 1
    assert corrupt.stderr.startswith("atoll: version 0 of the wire format is unknown")

    write_update(tmp_path / "update.atoll")
    right = atoll("inspect", tmp_path / "update.atoll")
    assert (right.returncode, right.stderr) == (0, "")
    assert "\x1b" not in right.stdout


@pytest.mark.parametrize(
    "words",
    ["inspect FRAME", "inspect --json FRAME", "inspect nothing", "simulate --help"],
)
@pytest.mark.parametrize("are_both", [False, True])
def test_a_reader_that_has_had_enough_hears_nothing(
    words: str, are_both: bool, tmp_path: Path
) -> None:
    """As of `atoll inspect FRAME | head -1`; a mistake is told as before."""
    write_update(tmp_path / "FRAME")
    reads, writes = os.pipe()
    os.close(reads)
    code = "from atoll.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()],
        cwd=tmp_path,
        stdout=writes,
        stderr=writes if are_both else subprocess.PIPE,
        text=True,
    )
    os.close(writes)

    is_mistake = "nothing" in words
    assert done.returncode == (2 if is_mistake and not are_both else 1)
    assert are_both or done.stderr.startswith(
        "atoll: cannot read" if is_mistake else ""
    )
    assert are_both or bool(done.stderr) == is_mistake


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("x"), 2),
        (SettingsError("x"), 2),
        (ModelError("x"), 2),
        (NonFinite("x", index=0), 2),
        (Unreachable("x"), 3),
        (RemoteError("x"), 3),
        (Refused("x"), 4),
        (LeaseLost("x"), 4),
        (CorruptError("x"), 5),
        (AtollError("x"), 1),
    ],
)
def test_an_exit_status_says_whose_fault_it_was(error: AtollError, status: int) -> None:
    """Each branch of the error tree has its status."""
    assert exit_code(error) == status


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`atoll --version` prints the version that one installs."""
    assert run(capsys, "--version") == (0, f"atoll {__version__}\n", "")


def test_help_is_what_was_agreed(capsys: pytest.CaptureFixture[str]) -> None:
    """No verb or flag comes or goes without a change of the stored listing."""
    listing = "".join(
        f"$ atoll {' '.join(words)}\n{run(capsys, *words)[1]}"
        for words in [["--help"], *([verb, "--help"] for verb in VERBS)]
    )

    assert listing == HELP.read_text()


def write_large(path: Path, pieces: int) -> None:
    """Write a sparse frame of zeros in fp32, 1 MiB for each piece."""
    zeros = blake3_digest(bytes(4 * PIECE_ELEMENTS))
    header = an_update(
        codec="fp32",
        elements=pieces * PIECE_ELEMENTS,
        body_bytes=4 * pieces * PIECE_ELEMENTS,
        pieces=(zeros,) * pieces,
    )
    with path.open("wb") as file:
        file.write(pack(header))
        file.truncate(file.tell() + header.body_bytes)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Inspecting 256 MiB takes at most 16 MiB more than inspecting 1 MiB."""
    code = (
        "import resource, sys\n"
        "from atoll.cli import main\n"
        "try: main(['inspect', sys.argv[1]])\n"
        "except SystemExit as exc: assert not exc.code\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peak_kib = []
    for pieces in (1, 256):
        write_large(tmp_path / "frame", pieces)
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "frame"],
            capture_output=True,
            text=True,
            check=True,
        )
        *_, verdict, peak = done.stdout.splitlines()
        assert verdict.startswith(f"verified: {pieces * 2**20} bytes of body")
        peak_kib.append(int(peak))

    assert peak_kib[1] - peak_kib[0] < 16 * 1024


def test_a_terminal_gets_colour_and_progress(tmp_path: Path) -> None:
    """On a terminal a large body shows how far it is, and the verdict is green."""
    write_large(tmp_path / "frame", 64)  # 64 MiB, from where on a bar is shown
    leader, follower = os.openpty()
    code = "from atoll.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "inspect", tmp_path / "frame"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm"},
    ):
        os.close(follower)
        shown = read_all(leader)

    assert "verifying" in shown
    assert "100%" in shown
    assert "\x1b[32mverified: 67108864 bytes of body in 64 pieces" in shown


def read_all(leader: int) -> str:
    """Return everything that was written to a terminal until its end."""
    parts = []
    try:
        while part := os.read(leader, 65536):
            parts.append(part)
    except OSError:  # Linux says so when the last writer has gone
        pass
    finally:
        os.close(leader)
    return b"".join(parts).decode()
