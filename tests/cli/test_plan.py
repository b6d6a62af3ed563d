"""`atoll plan` from numbers, from a run file and from a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from atoll.cli import main
from tests.cli.runs import as_user
from tests.cli.stores import Trained
from tests.run_client.conftest import served

ROOT = Path(__file__).parents[2]
EXAMPLE = "plan --params 1B --link 100Mbit --delay 40ms --step 1s --islands 4"


def atoll(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command line here; return its exit status and output."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    output = capsys.readouterr()
    return int(exit_.value.code or 0), output.out, output.err


def plan(capsys: pytest.CaptureFixture[str], *extra: str) -> dict[str, Any]:
    """Return the document of the example with other options."""
    code, out, err = atoll(capsys, *shlex.split(EXAMPLE), "--json", *extra)
    assert (code, err) == (0, "")
    document: dict[str, Any] = json.loads(out)
    return document


def test_the_page_of_planning_has_the_real_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The example is printed as it is in the docs."""
    code, out, _ = atoll(capsys, *shlex.split(EXAMPLE))

    assert code == 0
    assert f"```text\n{out}```" in (ROOT / "docs" / "planning.md").read_text()


def test_json_has_inputs_rows_reasons_and_the_published_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A program reads the same numbers."""
    document = plan(capsys)

    assert document["inputs"]["parameters"] == 10**9
    assert document["inputs"]["link"]["delay_s"] == 0.04
    assert document["inputs"]["link"]["coordinator_bits_per_s"] is None
    assert [row["is_marked"] for row in document["rows"]] == [False, False, True]
    assert document["rows"][2]["bytes_up"] == 515_625_000
    assert document["rows"][2]["cost"] is None
    assert document["data_parallel"]["utilisation"] == pytest.approx(0.0041, abs=1e-4)
    assert any("160 in bf16" in reason for reason in document["reasons"])
    assert any("1B +0.4 / +1.6 %" in line for line in document["published"])
    assert "overlap_steps = 32" in document["toml"]


def test_a_run_file_is_judged_with_its_own_islands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It has a row above the others."""
    run_file = tmp_path / "run.toml"
    run_file.write_text("[run]\nstart_islands = 3\n[sync]\nsync_every = 100\n")
    argv = ["plan", str(run_file), "--params", "1B", "--link", "100Mbit"]
    argv += ["--delay", "40ms", "--step", "1s"]
    _, out, _ = atoll(capsys, *argv, "--json")
    document = json.loads(out)
    _, text, _ = atoll(capsys, *argv)

    assert document["inputs"]["islands"] == 3
    assert document["judged"]["file"] == "run.toml"
    # bf16 without overlap: 160 s up, 160 s down, and 100 s of training.
    assert document["judged"]["utilisation"] == pytest.approx(0.235, abs=0.005)
    assert "\nbf16/bf16      run.toml " in text


def test_parameters_of_a_file_are_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Fragments are cut from its blocks; integers are no parameters."""
    file = tmp_path / "model.safetensors"
    arrays: dict[str, Any] = {
        f"h.{n}.w": np.zeros((1000, 10), np.float32) for n in range(2)
    }
    save_file({**arrays, "ids": np.zeros(9, np.int64)}, file)
    argv = ["--link", "1Mbit", "--delay", "10ms", "--step", "10ms", "--json"]
    _, out, _ = atoll(capsys, "plan", "--params", str(file), *argv)
    document = json.loads(out)

    assert document["inputs"]["parameters"] == 20_000
    assert max(row["num_fragments"] for row in document["rows"]) <= 2


def test_islands_of_several_paces(capsys: pytest.CaptureFixture[str]) -> None:
    """The slowest decides; the text has the share of each, and a remedy."""
    argv = [*shlex.split(EXAMPLE)[:-4], "--steps", "0.9s,1s,2s"]
    _, text, _ = atoll(capsys, *argv)

    assert "steps of 0.9, 1 and 2 s" in text
    assert "0.9 s: 45.0 %, 1 s: 50.0 %, 2 s: 100 %" in text
    assert "With sync.dynamic_local_updates=true" in text


@pytest.mark.parametrize(
    ("option", "exchange"), [("--store", "store"), ("--collective", "collective")]
)
def test_other_exchanges(
    capsys: pytest.CaptureFixture[str], option: str, exchange: str
) -> None:
    """A bucket and a collective have transfers of their own."""
    assert plan(capsys, option)["inputs"]["exchange"] == exchange


def test_options_of_the_link_and_of_the_search(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each of them reaches the model."""
    argv = ["--up", "20Mbit", "--shared", "--coordinator-link", "1Gbit/s"]
    argv += ["--request", "50ms", "--target", "0.9", "--wire", "int8/bf16"]
    document = plan(capsys, *argv, "--fragments", "2", "--max-sync-every", "100")
    link, (row,) = document["inputs"]["link"], document["rows"]

    assert (link["up_bits_per_s"], link["down_bits_per_s"]) == (2e7, 1e8)
    assert link["is_shared"]
    assert (link["coordinator_bits_per_s"], link["request_s"]) == (1e9, 0.05)
    assert document["inputs"]["target"] == 0.9
    assert (row["up"], row["down"]) == ("int8", "bf16")
    assert row["num_fragments"] <= 2
    assert row["sync_every"] <= 100


def test_prices_by_options_and_by_file(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Options are preferred; without either there is no money."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "atoll").mkdir()
    tokens = ["--tokens-per-step", "0.5M", "--end-tokens", "20B"]
    assert plan(capsys, *tokens)["rows"][0]["cost"] is None

    (tmp_path / "atoll" / "prices.toml").write_text('[islands]\n"*" = 5.0\n')
    by_file = plan(capsys, *tokens)["rows"][0]["cost"]
    by_option = plan(capsys, *tokens, "--usd-per-hour", "2.5")["rows"][0]["cost"]
    # 20 billion tokens are 10,000 steps of 4 islands: 2.8 hours of each.
    assert by_option["compute_usd"] == pytest.approx(27.78, abs=0.01)
    assert by_file["compute_usd"] == pytest.approx(55.56, abs=0.01)

    (tmp_path / "atoll" / "prices.toml").write_text("[islands\n")
    code, _, err = atoll(capsys, *shlex.split(EXAMPLE), *tokens)
    assert code == 2
    assert "prices.toml is no TOML file" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--link 100MB/s", "counts bytes. Links count bits: 800Mbit"),
        ("--link fast", "is no rate. Write 100Mbit"),
        ("--delay 40parsecs", "is no time. Write 40ms"),
        ("--params many", "is no number. Write 1B"),
        ("--target 140%", "must be a share between 0 and 1"),
        ("--wire fp8/bf16", "wire.up"),
        ("--store --collective", "exclude each other"),
        ("--usd-per-hour 2", "Prices need --tokens-per-step"),
        ("--steps 1s,2s --islands 3", "--steps has 2 islands, and --islands is 3"),
    ],
)
def test_wrong_options_are_refused(
    capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    """The exit code is 2, and the message has the value and a remedy."""
    code, _, err = atoll(capsys, *shlex.split(EXAMPLE), *shlex.split(argv))

    assert code == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("plan", "A plan needs the rate of an island's link"),
        ("plan --link 1Mbit --delay 1ms", "A plan needs --params and --step"),
        ("plan nowhere --link 1Mbit --delay 1ms", "'nowhere' is no URL of a run"),
    ],
)
def test_missing_inputs_are_named(
    capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    """With an example of the command."""
    code, _, err = atoll(capsys, *shlex.split(argv))

    assert code == 2
    assert message in err


def test_a_file_without_parameters_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A file of integers is no model."""
    file = tmp_path / "ids.safetensors"
    save_file({"ids": np.zeros(9, np.int64)}, file)
    argv = ["--link", "1Mbit", "--delay", "10ms", "--step", "10ms"]
    code, _, err = atoll(capsys, "plan", "--params", str(file), *argv)

    assert code == 2
    assert "no tensor of floating point numbers" in err


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Be a user without runs."""
    with pytest.MonkeyPatch.context() as patch:
        as_user(patch, tmp_path_factory.mktemp("home"))
        yield


def test_a_run_is_compared_with_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, user: None
) -> None:
    """Its directory has the pace, the waits and the size of its model."""
    with served(tmp_path / "run") as url:
        trained = Trained(url)
        elements = sum(anchor.size for anchor in trained.wait()["a"])
    argv = ["plan", str(tmp_path / "run"), "--link", "1Gbit", "--delay", "1ms"]
    code, out, err = atoll(capsys, *argv, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    text = atoll(capsys, *argv)[1]

    assert document["parameters"] == pytest.approx(elements, rel=0.1)
    assert set(document["islands"]) == {"a", "b"}
    assert 0 <= document["measured"] <= 1
    # These islands do not compute, so that nearly all of their time is waiting.
    assert document["agrees"] is (
        abs(document["measured"] - document["modelled"]) <= 0.05
    )
    assert document["agrees"] or document["what_ifs"] == []
    assert "measured over rounds 1 to 6" in text
