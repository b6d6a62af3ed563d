"""`atoll report RUN`: one page about a run, live or ended."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.export import draft_file
from atoll.cli.run_names import RUN, open_named
from atoll.coordinator.move import JOURNAL
from atoll.errors import UsageError
from atoll.report import RunRecord, record_of, run_report
from atoll.run_client import RunClient
from atoll.run_client.directory import DirectoryRunClient
from atoll.run_client.location import read_address

REPORT = "report.html"

MAX_BASELINE_BYTES = 4_000_000


def report(
    run: Annotated[str, RUN],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Default: NAME.html, here."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV of another training: tokens, loss. Drawn beside it.",
        ),
    ] = None,
    csv_directory: Annotated[
        Path | None,
        typer.Option("--csv", metavar="DIR", help="Also write the tables into DIR."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write one page about a run: loss, who counted, and time.

    The run may train, have ended, lie in a store, or be a coordinator's directory that
    is not served. The page needs no other file, has no script, and can be mailed.
    """
    points = [] if baseline is None else read_baseline(baseline)
    with closing(_open(run)) as client:
        record = record_of(client, points)
    file = out or Path(f"{_file_name(record.name)}.html")
    if out is None and file.exists():
        raise UsageError(f"{file} exists already. Give another name: --out FILE.")
    _write(file, run_report(record))
    tables = [] if csv_directory is None else write_tables(record, csv_directory)
    if as_json:
        paths = {"report": str(file), "tables": [str(table) for table in tables]}
        typer.echo(json.dumps(paths, indent=2))
        return
    typer.echo(f"The report is {file.resolve().as_uri()}")
    for table in tables:
        typer.echo(f"{table}")


def report_of_directory(directory: Path) -> Path:
    """Write the report of a run that is not served into its directory."""
    with closing(DirectoryRunClient(directory.absolute())) as client:
        record = record_of(client)
    file = directory / REPORT
    _write(file, run_report(record))
    return file


def _open(run: str) -> RunClient:
    """Return the client of a run; a directory that is not served answers for itself."""
    directory = Path(run)
    if "://" not in run and (directory / JOURNAL).is_dir():
        address = read_address(directory)
        if address is None or not address.is_open:
            return DirectoryRunClient(directory.absolute())
    return open_named(run)


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip(".")


def read_baseline(file: Path) -> list[tuple[float, float]]:
    """Return the tokens and losses of a CSV file.

    Raises:
        UsageError: it is missing, too large, or a line has no two numbers.
    """
    try:
        size = file.stat().st_size
        if size > MAX_BASELINE_BYTES:
            raise UsageError(
                f"{file} has {size} bytes, more than {MAX_BASELINE_BYTES}."
            )
        lines = list(csv.reader(file.read_text().splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise UsageError(f"{file} could not be read as CSV: {exc}") from exc
    points = [_point(file, n, line) for n, line in enumerate(lines, 1) if line]
    numbers = [point for point in points if point is not None]
    if len(numbers) < 2:
        raise UsageError(
            f"{file} has {len(numbers)} lines with tokens and a loss, not 2."
        )
    return sorted(numbers)


def _point(file: Path, number: int, line: Sequence[str]) -> tuple[float, float] | None:
    """Return the numbers of a line; None for a heading in the first one."""
    try:
        tokens, loss = float(line[0]), float(line[1])
    except (ValueError, IndexError):
        if number == 1:
            return None
        raise UsageError(
            f"Line {number} of {file} is {','.join(line)[:80]!r}. Write tokens, loss."
        ) from None
    if not (math.isfinite(tokens) and math.isfinite(loss) and tokens >= 0):
        raise UsageError(f"Line {number} of {file} has no finite tokens and loss.")
    return tokens, loss


def write_tables(record: RunRecord, directory: Path) -> list[Path]:
    """Write islands, curves, rounds and events as CSV files, and return their names."""
    directory.mkdir(parents=True, exist_ok=True)
    past = record.past
    tables = {
        "islands": record.islands,
        "curves": list(_curve_rows(past["curves"])),
        "rounds": [
            dict(zip(("round", "fragment", "at", "marks"), column, strict=False))
            for column in past["marks"]["columns"]
        ],
        "events": past["notes"],
    }
    files = {directory / f"{name}.csv": rows for name, rows in tables.items()}
    for file, rows in files.items():
        _write(file, _csv_text(rows))
    return list(files)


def _curve_rows(curves: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for island, columns in curves["islands"].items():
        names = [name for name in columns if name != "not_finite"]
        for index, unix_s in enumerate(curves["at"]):
            row = {"at": unix_s, "round": curves["round"][index], "island": island}
            yield row | {name: columns[name][index] for name in names}


def _csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    keys = dict.fromkeys(key for row in rows for key in row)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(keys)
    writer.writerows([_cell(row.get(key)) for key in keys] for row in rows)
    return text.getvalue()


def _write(file: Path, text: str) -> None:
    with draft_file(file, replaces=True) as draft:
        draft.write_text(text)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value
