"""Code that a coordinator keeps for islands: put by operators, fetched by digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.bundle.archive import pack
from atoll.coordinator import directory
from atoll.coordinator.directory import CodeFiles
from atoll.errors import CorruptError, Refused, UsageError
from atoll.http import HttpClient
from atoll.security import Role
from atoll.settings import RunSettings
from atoll.wire import blake3_digest
from tests.coordinator.serving import address_of, bearer, serving

CODE = pack({"train.py": b"print('aboard')\n"})
DIGEST = blake3_digest(CODE).hex()


def test_only_an_operator_puts_code(tmp_path: Path) -> None:
    """Whoever puts it commands every island; an island's token only fetches it."""
    with serving(tmp_path / "run", RunSettings.from_dict({})) as coordinator:
        caller = HttpClient(
            *address_of(coordinator.url), timeout_s=30.0, connect_timeout_s=30.0
        )
        try:
            answers = []
            for method, role, body in (
                ("PUT", Role.ISLAND, CODE),
                ("GET", Role.ISLAND, None),
                ("PUT", Role.OPERATOR, CODE),
                ("PUT", Role.OPERATOR, CODE),
                ("GET", Role.ISLAND, None),
                ("PUT", Role.OPERATOR, CODE + b"x"),
            ):
                shown = {"Authorization": bearer(tmp_path / "run", role)}
                target = f"/code/{DIGEST}"
                answers.append(caller.call(method, target, headers=shown, body=body))
        finally:
            caller.close()

    assert [each.status // 100 for each in answers] == [4, 4, 2, 2, 2, 4]
    assert answers[0].status == 403
    assert bytes(answers[4].body) == CODE
    assert (tmp_path / "run" / "code" / DIGEST).read_bytes() == CODE


def test_what_is_no_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests and archives are judged before anything is written."""
    files = CodeFiles(tmp_path)
    with pytest.raises(UsageError, match="is no digest"):
        files.store("../run", CODE)
    with pytest.raises(CorruptError, match="does not have the digest"):
        files.store("0" * 64, CODE)
    other = b"x" * 1024
    with pytest.raises(CorruptError, match="no archive"):
        files.store(blake3_digest(other).hex(), other)
    with pytest.raises(Refused, match="has no code"):
        files.find(DIGEST)
    assert not (tmp_path / "code").exists()
    monkeypatch.setattr(directory, "MAX_CODES", 1)
    files.store(DIGEST, CODE)
    more = pack({"other.py": b""})
    with pytest.raises(Refused, match="keeps 1 kinds of code already"):
        files.store(blake3_digest(more).hex(), more)
