"""What another user of the machine has put there is not used: he may know it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.errors import UsageError
from atoll.island.identity import island_key
from atoll.security import Credentials, Role, make_token, read_token, token_file
from atoll.security.private_files import private_directory, read_private
from atoll.testing.fixtures import plain_settings

STRANGER = 12345

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make files of another user"
)


def served(directory: Path) -> Coordinator:
    return Coordinator(directory, plain_settings(), listening=ListenOptions())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run that was served before."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    served(directory).close()
    return directory


def given_away(*paths: Path) -> None:
    for path in paths:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def test_a_run_that_another_user_has_planted_is_not_served(run: Path) -> None:
    """Its tokens and its certificate are his."""
    given_away(run, *run.rglob("*"))

    with pytest.raises(UsageError, match=r"run belongs to user 12345 \(mode 700\)"):
        served(run)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        private_directory(run)


@pytest.mark.parametrize("name", ["island.token", "operator.token", "certificate.key"])
def test_a_private_file_of_another_user_is_not_used(run: Path, name: str) -> None:
    """The error says whose it is, and what to do."""
    path = next(run.glob(f"*{name}"))
    given_away(path)

    with pytest.raises(UsageError, match=r"belongs to user 12345.*Choose another"):
        served(run)


def test_a_token_behind_a_link_is_not_used(run: Path, tmp_path: Path) -> None:
    """A link may lead to whatever its maker likes, and elsewhere tomorrow."""
    path = token_file(run, Role.ISLAND)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(UsageError, match=r"island\.token cannot be .* Choose a place"):
        served(run)


def test_a_run_that_others_can_write_to_is_not_served(run: Path) -> None:
    """Whoever writes to the directory can replace what is in it."""
    run.chmod(0o770)

    with pytest.raises(UsageError, match=r"mode 770.*chmod go-w"):
        served(run)


def test_a_folder_where_anybody_can_replace_the_run_is_refused(tmp_path: Path) -> None:
    """Unless its sticky bit keeps others away, as that of /tmp does."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UsageError, match=r"shared, which .* mode 0777 .*chmod o-w"):
        private_directory(shared / "run")
    shared.chmod(0o1777)
    private_directory(shared / "run")
    given_away(shared)  # its owner may rename what is in it, sticky or not

    with pytest.raises(UsageError, match="belongs to user 12345"):
        private_directory(shared / "run")


def test_a_volume_of_a_container_may_be_writable_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mode is its operator's choice; what another user plants there is refused."""
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == volume)
    private_directory(volume / "run")
    given_away(volume / "run")

    with pytest.raises(UsageError, match="belongs to user 12345"):
        private_directory(volume / "run")


def test_a_link_that_another_user_has_planted_is_no_directory(tmp_path: Path) -> None:
    """A link of one's own may lead to a larger disk."""
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    private_directory(link)
    given_away(link)

    with pytest.raises(UsageError, match="link belongs to user 12345"):
        private_directory(link)


def a_key(directory: Path) -> Callable[[], object]:
    def read() -> object:
        return island_key(directory, run="r", island="a")

    read()
    return read


def a_credential(directory: Path) -> Callable[[], object]:
    credentials = Credentials(directory)
    url = "http://127.0.0.1:7000"
    credentials.remember(url, pin=None, tokens={Role.ISLAND: make_token(Role.ISLAND)})
    return lambda: credentials.find(url)


@pytest.mark.parametrize("make", [a_key, a_credential])
def test_what_a_user_keeps_for_himself_is_his_own(
    make: Callable[[Path], Callable[[], object]], tmp_path: Path
) -> None:
    """Keys of islands and credentials of runs."""
    read = make(tmp_path / "kept")
    given_away(*(tmp_path / "kept").iterdir())

    with pytest.raises(UsageError, match="belongs to user 12345"):
        read()


def test_a_mounted_secret_is_a_token(tmp_path: Path) -> None:
    """Kubernetes links to files of root that the process reads by its group."""
    token = make_token(Role.ISLAND)
    data = tmp_path / "..data"
    data.mkdir()
    (data / "token").write_text(token.reveal())
    (data / "token").chmod(0o440)
    (tmp_path / "token").symlink_to(Path("..data", "token"))
    assert read_token(tmp_path / "token", is_given=True) == token
    with pytest.raises(UsageError, match="cannot be written or read"):
        read_private(tmp_path / "token", content="token", max_bytes=256)
    os.chown(data / "token", 0, STRANGER)
    with pytest.raises(UsageError, match="mode 440: others may read"):
        read_token(tmp_path / "token", is_given=True)
    given_away(data / "token")

    with pytest.raises(UsageError, match="belongs to user 12345"):
        read_token(tmp_path / "token", is_given=True)
