"""`atoll report` on real runs: served, stopped, and in a store."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from atoll.cli.report import read_baseline
from atoll.errors import UsageError
from tests.cli import stores
from tests.cli.runs import RUN_FILE, as_user, ended, run, serving, started


def test_a_run_is_reported_while_it_trains_and_after_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same islands from the coordinator, and from the directory alone."""
    with serving(tmp_path, "--set", "run.end_rounds=3") as served:
        as_user(monkeypatch, served.home)
        stores.Trained(served.url).wait()
        live = tmp_path / "live.html"
        code, output, _ = run(capsys, "report", served.url, "-o", str(live), "--json")
        directory = served.directory
        served.stop()
    assert code == 0
    assert json.loads(output)["report"] == str(live)
    after, tables = tmp_path / "after.html", tmp_path / "tables"
    code, _, _ = run(
        capsys, "report", str(directory), "-o", str(after), "--csv", str(tables)
    )

    assert code == 0
    for page in (live.read_text(), after.read_text()):
        assert "Two islands" in page
        assert "3 rounds" in page
        assert "<h2>Updates by round</h2>" in page
    rows, events = (
        list(csv.DictReader((tables / f"{name}.csv").read_text().splitlines()))
        for name in ("islands", "events")
    )
    assert [row["counted"] for row in rows] == ["6", "6"]  # of two fragments
    assert {row["event"] for row in events} >= {"run_founded", "run_ended"}


def test_a_run_in_a_store_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of its islands and settings."""
    as_user(monkeypatch, tmp_path / "home")
    url = stores.made(tmp_path / "bucket", end_rounds=2)
    stores.Trained(url).wait()
    out = tmp_path / "reef.html"
    code, _, _ = run(capsys, "report", url, "-o", str(out))

    assert code == 0
    assert "<h2>Islands</h2>" in out.read_text()


def test_a_baseline_is_drawn_beside_the_islands(tmp_path: Path) -> None:
    """A heading is allowed; lines are sorted by tokens."""
    file = tmp_path / "baseline.csv"
    file.write_text("tokens,loss\n200,1.5\n100,2.5\n")

    assert read_baseline(file) == [(100.0, 2.5), (200.0, 1.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100,2\nx,1\n", "Line 2"),
        ("100,2\n200,nan\n", "no finite tokens"),
        ("100,2\n", "1 lines"),
        ("1" * 4_000_001, "more than 4000000"),
    ],
)
def test_a_bad_baseline_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    """The error names the file, and the line."""
    file = tmp_path / "baseline.csv"
    file.write_text(text)

    with pytest.raises(UsageError, match=message) as refused:
        read_baseline(file)
    assert str(file) in str(refused.value)


def test_serve_until_end_leaves_a_report(tmp_path: Path) -> None:
    """In the run's directory, and its last line names it."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    directory = tmp_path / "run"
    options = ("--dir", directory, "--until-end", "--no-tls", "--linger", "0")
    process = started(
        "serve", tmp_path / "run.toml", *options, "--json", home=tmp_path / "home"
    )
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    with pytest.MonkeyPatch.context() as patch:
        as_user(patch, tmp_path / "home")
        stores.Trained(url).wait()
    status, _, messages = ended(process)

    assert status == 0
    assert str(directory / "report.html") in messages
    assert "Two islands" in (directory / "report.html").read_text()
