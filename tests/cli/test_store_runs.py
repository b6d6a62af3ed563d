"""A run without a coordinator, by its commands: init, join, status, export, doctor."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import atoll
from atoll.cli import load_command
from atoll.errors import UsageError
from atoll.exchange.bucket import keys
from atoll.store import FileStore
from atoll.weights import lay_out
from tests.cli import runs
from tests.cli.runs import RUN_FILE, as_user, run
from tests.cli.stores import MODEL, SHAPES, Trained, made, settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "object-store.md"
COMMANDS = re.findall(r"^    atoll (.*)$", DOCUMENT.read_text(), flags=re.MULTILINE)

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, tmp_path / "home")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Trained]:
    """Return the URL of a run of 23 rounds that has ended, and who took part."""
    place = tmp_path_factory.mktemp("store") / "run"
    with pytest.MonkeyPatch.context() as patch:
        as_user(patch, place.parent / "home")
        trained = Trained(made(place, end_rounds=23))
        trained.wait()
    return str(place), trained


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_page_is_one(line: str) -> None:
    """Verb, options and arguments are those of the command line."""
    verb, *words = shlex.split(line)
    command = load_command(verb)

    command.make_context(verb, words)


def test_a_run_is_made_and_known_by_name(
    tmp_path: Path, run_file: Path, capsys: Said
) -> None:
    """The commands to join and to look are printed, and the name will do from then."""
    place = tmp_path / "store"
    code, out, err = run(capsys, "init", place, run_file, "--set", "run.quorum=2")
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())

    assert (code, err) == (0, "")
    assert facts["url"] == str(place)
    assert facts["join"] == f"atoll join {place} -- COMMAND"
    code, out, _ = run(capsys, "status", "lagoon", "--json")
    said = json.loads(out)
    assert (code, said["run"], said["state"]) == (0, facts["run"], "founding")
    assert (said["quorum"], said["start_islands"]) == (2, 2)
    assert said["why"] == "Waits for the first island, which brings the weights."


def test_what_is_there_stays(tmp_path: Path, run_file: Path, capsys: Said) -> None:
    """A second run at a URL is refused, and the first keeps its settings."""
    place = tmp_path / "store"
    first = json.loads(run(capsys, "init", place, run_file, "--json")[1])
    code, out, err = run(capsys, "init", place, run_file, "--set", "run.quorum=2")

    assert (code, out) == (2, "")
    assert f"There is a run at {place} already, {first['run']!r}" in err
    assert json.loads(run(capsys, "status", place, "--json")[1])["quorum"] == 1


def test_a_run_is_made_in_python(tmp_path: Path) -> None:
    """`atoll.init` returns the run's id, and refuses where there is one."""
    name = atoll.init(str(tmp_path / "store"), settings())

    assert name.startswith("lagoon-")
    with pytest.raises(UsageError, match=f"already, '{name}'"):
        atoll.init(str(tmp_path / "store"), settings())


@pytest.mark.parametrize("beside", ["address.json", "journal"])
def test_a_coordinators_directory_is_told_apart(
    beside: str, tmp_path: Path, run_file: Path, capsys: Said
) -> None:
    """No run is made in it, and joining says how it is reached."""
    place = tmp_path / "lagoon.atoll"
    (place / beside).mkdir(parents=True)
    code, _, err = run(capsys, "init", place, run_file)

    assert code == 2
    assert "is the directory of a coordinator" in err
    assert f"atoll serve RUN.toml --dir {place}" in err
    assert not (place / "settings").exists()
    if beside == "journal":
        assert run(capsys, "join", place, "--", "true")[0] == 2
        assert run(capsys, "status", f"file://{place}")[0] == 2


def test_a_url_with_one_slash_makes_no_directory(run_file: Path, capsys: Said) -> None:
    """Islands of several machines would each meet nobody there."""
    code, _, err = run(capsys, "init", "s3:/reef/lagoon", run_file)

    assert code == 2
    assert "has one slash after its colon" in err
    assert not Path("s3:").exists()


def test_a_store_that_connects_when_it_is_opened_may_not_answer(
    run_file: Path, capsys: Said
) -> None:
    """FTP does; nobody listens on that port of this machine."""
    code, _, err = run(capsys, "init", "ftp://127.0.0.1:1/lagoon", run_file)

    assert code == 3
    assert "did not answer" in err


def test_a_coordinators_url_makes_no_store(run_file: Path, capsys: Said) -> None:
    """`atoll init` with a URL of HTTP names what does that."""
    code, _, err = run(capsys, "init", "https://127.0.0.1:1", run_file)

    assert code == 2
    assert "is made by `atoll serve RUN.toml`" in err


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("export", "w.safetensors"),
        ("control", "pause"),
        ("doctor",),
        ("join", "--", "touch", "started"),
    ],
)
def test_a_url_without_a_run_is_refused_with_the_command_to_type(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Said,
) -> None:
    """Nothing is started, and nothing is made there."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "store"
    verb, *rest = words
    code, out, err = run(capsys, verb, place, *rest)

    assert code == 2
    assert f"Make one first: `atoll init {place} RUN.toml`" in out + err
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == []


def test_a_command_joins_by_its_environment(tmp_path: Path) -> None:
    """ATOLL_RUN is the URL, absolute, and no token is asked for."""
    url = made(tmp_path / "store")
    say = "import os; print(os.environ['ATOLL_RUN'], os.environ['ATOLL_ISLAND'])"
    code, out, err = runs.atoll(
        *("join", "./store", "--island", "tokyo-1", "--", "python", "-c", say),
        home=tmp_path / "home",
        cwd=tmp_path,
    )

    assert (code, out, err) == (0, f"{url} tokyo-1\n", "")


def test_a_certificate_is_for_coordinators(tmp_path: Path, capsys: Said) -> None:
    """A store has its own credentials."""
    url = made(tmp_path / "store")
    code, _, err = run(capsys, "join", url, "--certificate", "x.pem", "--", "true")

    assert code == 2
    assert "--certificate is for a coordinator" in err


def test_an_invitation_needs_a_coordinator(tmp_path: Path, capsys: Said) -> None:
    """The error has the command that does it for a store."""
    url = made(tmp_path / "store")
    code, _, err = run(capsys, "invite", url)

    assert code == 2
    assert "is in a store, and this needs a coordinator" in err
    assert f"atoll join {url} -- COMMAND" in err


def test_status_of_a_run_that_has_ended(
    over: tuple[str, Trained], capsys: Said
) -> None:
    """Every island has left, with the round it holds and whether it counted."""
    code, page, _ = run(capsys, "status", over[0], "--watch")
    said = json.loads(run(capsys, "status", over[0], "--json")[1])

    assert code == 0
    assert page.startswith("lagoon  ended  round 23 of 23")
    assert "Round 23 was the last." in page
    assert [(i["island"], i["state"], i["round"]) for i in said["islands"]] == [
        ("a", "left", 23),
        ("b", "left", 23),
    ]
    assert all(i["counted"] >= 8 for i in said["islands"])


def exported(url: str, out: Path, capsys: Said, *words: str) -> dict[str, np.ndarray]:
    """Export, and return what the file holds."""
    code, _, err = run(capsys, "export", url, out, *words)
    assert (code, err) == (0, "")
    return load_file(out)


def test_the_weights_are_those_of_every_island(
    over: tuple[str, Trained], tmp_path: Path, capsys: Said
) -> None:
    """Bit for bit, by the names and shapes of the model."""
    url, trained = over
    found = exported(url, tmp_path / "w.safetensors", capsys)

    assert {name: each.shape for name, each in found.items()} == SHAPES
    layout = lay_out(MODEL, settings())
    for fragment, anchor in zip(layout, trained.anchors["a"], strict=True):
        for at, tensor in enumerate(fragment.tensors):
            part = anchor[fragment.offsets[at] : fragment.offsets[at + 1]]
            assert found[tensor.name].tobytes() == part.tobytes()


def test_weights_of_a_round_are_worked_out_again(
    over: tuple[str, Trained], tmp_path: Path, capsys: Said
) -> None:
    """The last round's are the newest; of one that is gone the others are named."""
    url = over[0]
    newest = exported(url, tmp_path / "1.safetensors", capsys)
    last = exported(url, tmp_path / "2.safetensors", capsys, "--round", "23")
    before = exported(url, tmp_path / "3.safetensors", capsys, "--round", "22")
    code, _, err = run(capsys, "export", url, tmp_path / "4", "--round", "2")

    assert all(newest[name].tobytes() == last[name].tobytes() for name in SHAPES)
    assert any(newest[name].tobytes() != before[name].tobytes() for name in SHAPES)
    assert code == 4
    assert "The anchor of round 2 is not kept: rounds 0, 1" in err
    assert "to 23 are available" in err
    assert not (tmp_path / "4").exists()


def test_an_export_founds_another_run(
    over: tuple[str, Trained], tmp_path: Path, run_file: Path, capsys: Said
) -> None:
    """Its round 0 is the file, before any island has come."""
    file = tmp_path / "w.safetensors"
    given = exported(over[0], file, capsys)
    place = tmp_path / "next"
    code, out, _ = run(capsys, "init", place, run_file, "--init", file, "--json")
    found = exported(str(place), tmp_path / "again.safetensors", capsys)

    assert (code, json.loads(out)["founded"]) == (0, True)
    assert all(given[name].tobytes() == found[name].tobytes() for name in SHAPES)
    said = json.loads(run(capsys, "status", place, "--json")[1])
    assert said["state"] == "waiting"
    assert said["why"] == "Waits for 2 more of start_islands=2."


def test_a_founding_that_was_cut_off_goes_on(
    over: tuple[str, Trained], tmp_path: Path, run_file: Path, capsys: Said
) -> None:
    """The same command again founds the run that the first one made."""
    file = tmp_path / "w.safetensors"
    exported(over[0], file, capsys)
    place = tmp_path / "next"
    first = json.loads(run(capsys, "init", place, run_file, "--json")[1])
    again = json.loads(
        run(capsys, "init", place, run_file, "--init", file, "--json")[1]
    )

    assert again["run"] == first["run"]
    assert (place / "run.json").exists()
    code, _, err = run(capsys, "init", place, run_file, "--init", file)
    assert (code, f"There is a run at {place} already" in err) == (2, True)


def test_weights_without_an_order_make_nothing(
    tmp_path: Path, run_file: Path, capsys: Said
) -> None:
    """The file says too little, and the first island can load it."""
    file, place = tmp_path / "w.safetensors", tmp_path / "store"
    save_file({"head": np.zeros(33, np.float32)}, file)
    code, _, err = run(capsys, "init", place, run_file, "--init", file)

    assert code == 2
    assert "let the first island load the file" in err
    assert FileStore(place).items("") == []


def test_a_run_without_weights_has_none_to_export(tmp_path: Path, capsys: Said) -> None:
    """Exit code 4, and no file."""
    url = made(tmp_path / "store")
    code, _, err = run(capsys, "export", url, tmp_path / "w.safetensors")

    assert code == 4
    assert "The run has no weights yet" in err
    assert not (tmp_path / "w.safetensors").exists()


def test_a_doctor_looks_at_every_permission(tmp_path: Path, capsys: Said) -> None:
    """One step each, and nothing is left in the store."""
    url = made(tmp_path / "store")
    code, out, _ = run(capsys, "doctor", url, "--json")
    steps = {row["step"]: row["said"] for row in json.loads(out)}

    assert code == 0
    assert list(steps) == [
        *("store", "list", "write", "read", "put once", "ranges", "delete"),
        *("run", "clock", "round trip", "upload"),
    ]
    assert steps["put once"] == "the first object stays"
    assert steps["run"].endswith("not founded yet")
    assert [item.key for item in FileStore(Path(url)).items("")] == [keys.SETTINGS]


def test_a_coordinator_takes_no_decider(
    tmp_path: Path, run_file: Path, capsys: Said
) -> None:
    """It decides itself, and the message says where a decider belongs."""
    words = ("--dir", tmp_path / "run", "--set", 'store.decider="tokyo-1"')
    code, _, err = run(capsys, "serve", run_file, *words)

    assert code == 2
    assert "store.decider='tokyo-1' has no meaning with a coordinator" in err
    assert not (tmp_path / "run").exists()


def test_objects_of_a_run_can_be_read(over: tuple[str, Trained], capsys: Said) -> None:
    """A roster by its path and by its URL; what is no document is refused."""
    place = Path(over[0])
    key = keys.roster(0, 23)
    code, page, _ = run(capsys, "inspect", place / key)
    assert code == 0
    assert page.startswith("roster document")
    assert [line.split()[:3] for line in page.splitlines()[-2:]] == [
        ["a", "1", "counted"],
        ["b", "1", "counted"],
    ]
    code, out, _ = run(capsys, "inspect", f"file://{place / key}", "--json")
    said = json.loads(out)
    assert (code, said["kind"], said["round"]) == (0, "roster", 23)
    assert [entry["island"] for entry in said["roster"]] == ["a", "b"]
    for kind, each in (
        ("settings", keys.SETTINGS),
        ("run", keys.RUN),
        ("member", keys.member("a", 1)),
    ):
        out = run(capsys, "inspect", place / each, "--json")[1]
        assert json.loads(out)["kind"] == kind
        assert "nonce" not in out
    assert run(capsys, "inspect", f"file://{place}/rounds/0/99/roster")[0] == 2


def test_a_document_that_is_none_is_corrupt(tmp_path: Path, capsys: Said) -> None:
    """Exit code 5, with the reason."""
    (tmp_path / "x").write_text('{"format": 1, "document": {}}')
    code, _, err = run(capsys, "inspect", tmp_path / "x")

    assert code == 5
    assert "This is no document of a run" in err
