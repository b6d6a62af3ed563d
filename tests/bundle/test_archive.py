"""The bytes of a bundle: one way to write them, and what a reader refuses."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from atoll.bundle import Bundle, archive
from atoll.bundle.archive import pack, unpack
from atoll.errors import CorruptError, UsageError
from tests.bundle.samples import PLAIN, member, tar_of, written


def test_the_same_files_are_the_same_bytes(tmp_path: Path) -> None:
    """Times, modes and the order of writing leave no trace."""
    one = written(tmp_path / "one", dict(PLAIN))
    other = written(tmp_path / "other", dict(reversed(PLAIN.items())))
    (other / "config.json").chmod(0o755)

    assert Bundle.of_directory(one).data == Bundle.of_directory(other).data


def test_the_digest_of_known_files_is_known() -> None:
    """No machine and no version gives another: the bytes are in this test."""
    data = pack({"a/b.txt": b"hello"})

    # Of the header only name, size and checksum are not fixed: 5 is 00000000005.
    assert data[:8] == b"a/b.txt\0"
    assert data[124:136] == b"00000000005\0"
    assert data[512:517] == b"hello"
    assert len(data) == 4 * 512
    digest = "61f9d9acb9de915341cbb25e012b1f5765a13f4d72027e2312cb2517f4868e53"
    assert Bundle(data, {}).digest == digest


def test_an_archive_is_read_by_others() -> None:
    """Whoever has `tar` can look into it."""
    with tarfile.open(fileobj=io.BytesIO(pack(PLAIN))) as tar:
        assert tar.getnames() == sorted(PLAIN)
        assert tar.getmember("config.json").size == len(PLAIN["config.json"])


def test_what_is_packed_comes_out() -> None:
    """Files of every size around a block are whole."""
    files = {f"f{size}": bytes(range(256)) * 4 for size in range(3)}
    files |= {f"s{size}.txt": b"x" * size for size in (0, 1, 511, 512, 513)}

    assert unpack(pack(files)) == files


def test_an_edited_file_has_another_digest(tmp_path: Path) -> None:
    """One byte of one file makes it another bundle."""
    directory = written(tmp_path, PLAIN)
    before = Bundle.of_directory(directory).digest
    (directory / "tokenizer.json").write_bytes(b"[]")

    assert Bundle.of_directory(directory).digest != before


def refused(data: bytes, why: str) -> None:
    with pytest.raises(CorruptError, match=why):
        unpack(data)


def test_an_absolute_path_is_refused() -> None:
    """Nothing is written outside of where a bundle is staged, by any name."""
    refused(tar_of(member("/etc/passwd.txt")), "absolute path")


def test_a_path_that_leads_out_is_refused() -> None:
    """Nor by a name that climbs."""
    refused(tar_of(member("a/../../b.txt")), "leads out of the bundle")


@pytest.mark.parametrize(
    "name", ["a//b", "./a", "a/.", ".hidden", "a b", "a\\b", "a.", "ä.txt", "a\nb"]
)
def test_a_name_that_means_something_else_elsewhere_is_refused(name: str) -> None:
    """What one system reads as another path is no name."""
    refused(tar_of(member(name), form=tarfile.GNU_FORMAT), "cannot be a name|long name")


def test_a_symbolic_link_is_refused() -> None:
    """What it points to is nobody's business."""
    refused(tar_of(member("a", kind=tarfile.SYMTYPE)), "symbolic link")


def test_a_hard_link_is_refused() -> None:
    """Nor what it shares its bytes with."""
    refused(tar_of(member("a", kind=tarfile.LNKTYPE)), "hard link")


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE])
def test_a_device_is_refused(kind: bytes) -> None:
    """A bundle holds bytes, not machines."""
    refused(tar_of(member("a", kind=kind)), "is a device")


def test_a_pipe_is_refused() -> None:
    """Nobody waits for the other end of one."""
    refused(tar_of(member("a", kind=tarfile.FIFOTYPE)), "is a pipe")


def test_a_directory_of_its_own_is_refused() -> None:
    """Directories are what names of files need, and no more."""
    refused(tar_of(member("a", kind=tarfile.DIRTYPE)), "an entry for a directory")


def test_a_sparse_file_is_refused() -> None:
    """A file that unpacks larger than it is sent is not one of ours."""
    refused(tar_of(member("a", kind=tarfile.GNUTYPE_SPARSE)), "sparse file")


def test_a_name_said_twice_is_refused() -> None:
    """The second would take the place of the first."""
    one = pack({"a.txt": b"1"})[:1024]

    refused(one + pack({"a.txt": b"2"}), "occurs twice")


def test_names_that_differ_in_case_only_are_refused() -> None:
    """On a system that ignores case one would take the place of the other."""
    refused(pack({"A.txt": b"1"})[:1024] + pack({"a.txt": b"2"}), "differ in case only")


def test_directories_that_differ_in_case_only_are_refused() -> None:
    """So would a directory."""
    refused(pack({"A/x.txt": b"1"})[:1024] + pack({"a/y.txt": b"2"}), "in case only")


def test_a_file_that_is_a_directory_too_is_refused() -> None:
    """One name is one thing."""
    refused(pack({"a": b"1"})[:1024] + pack({"a/b": b"2"}), "a file and a directory")


def test_an_archive_that_unpacks_larger_than_it_is_is_refused() -> None:
    """What a header says is judged before anything is taken by it."""
    info, _ = member("a.txt")
    info.size = 2**30

    refused(info.tobuf(tarfile.USTAR_FORMAT), "at most 134217728")
    refused(pack({"a.txt": bytes(2**20)})[:2048], "the archive ends before that")


def test_a_size_that_is_none_is_refused() -> None:
    """Neither binary sizes nor signs are numbers here."""
    data = bytearray(pack({"a.txt": b"1"}))
    data[124:136] = b"\x80" + bytes(10) + b"\x01"

    refused(bytes(data), "should have no bytes")


def test_a_compressed_archive_is_refused() -> None:
    """What unpacks to a thousand times its size never does."""
    refused(gzip.compress(pack({"a.txt": bytes(10**6)})), "no archive of a bundle")


def test_an_extended_header_is_refused() -> None:
    """It would give the next file another name."""
    long = "a" * 90 + "/" + "b" * 90

    refused(tar_of(member(long), form=tarfile.PAX_FORMAT), "extended header|characters")
    refused(tar_of(member("a" * 120), form=tarfile.GNU_FORMAT), "long name")
    info, _ = member("a.txt")
    info.pax_headers = {"path": "../../x"}
    refused(tar_of((info, b""), form=tarfile.PAX_FORMAT), "extended header")


def test_weights_are_refused_by_name() -> None:
    """A bundle has none, and where they belong is said."""
    for name in ("model.safetensors", "pytorch_model.bin", "x.pt", "a/B.CKPT"):
        refused(tar_of(member(name)), "holds weights.*--init FILE")


def test_an_archive_that_is_cut_off_is_refused() -> None:
    """Wherever it ends."""
    data = pack(PLAIN)
    for size in range(0, len(data), 300):
        with pytest.raises(CorruptError):
            unpack(data[:size])


def test_what_lies_behind_is_refused() -> None:
    """Two archives with the same files have the same bytes, and no others."""
    data = pack({"a.txt": b"1"})

    refused(data + bytes(512), "follow the end")
    refused(data[:600] + b"x" + data[601:], "follow 'a.txt'")


def test_an_owner_or_a_time_is_refused() -> None:
    """The same files under another header would be another digest."""
    info, content = member("a.txt", b"1")
    info.mtime = 7

    refused(tar_of((info, content)), "differs from the one that Atoll writes")


def test_another_order_is_refused() -> None:
    """So would the same files in another order."""
    refused(pack({"b.txt": b"1"})[:1024] + pack({"a.txt": b"2"}), "not in its order")


def test_nothing_is_no_bundle(tmp_path: Path) -> None:
    """An empty directory defines nothing, and an empty archive is not one."""
    refused(bytes(1024), "holds nothing")
    with pytest.raises(UsageError, match="nothing to put"):
        Bundle.of_directory(tmp_path)


def test_too_many_files_are_refused() -> None:
    """Their number is bounded, and the bound is said."""
    many = {f"{number:05}.txt": b"" for number in range(archive.MAX_FILES + 1)}

    with pytest.raises(UsageError, match="1025 files are too many"):
        pack(many)


def test_too_many_bytes_are_refused(tmp_path: Path) -> None:
    """A directory that is too large is not read to its end."""
    with (tmp_path / "data.txt").open("wb") as file:
        file.truncate(archive.MAX_BYTES + 1)

    with pytest.raises(UsageError, match=r"more than 134217728 bytes.*'data.txt'"):
        Bundle.of_directory(tmp_path)


def test_a_name_that_is_too_long_is_refused() -> None:
    """By its length, or by how deep it lies."""
    with pytest.raises(UsageError, match="at most 100 in 8"):
        pack({"a" * 101: b""})
    with pytest.raises(UsageError, match="at most 100 in 8"):
        pack({"/".join("abcdefghi"): b""})


def test_another_digest_is_refused() -> None:
    """What was altered on its way is not unpacked at all."""
    bundle = Bundle(pack(PLAIN), PLAIN)

    assert Bundle.of_archive(bundle.data, digest=bundle.digest).files == PLAIN
    with pytest.raises(CorruptError, match="was altered"):
        Bundle.of_archive(bundle.data, digest="0" * 64)
