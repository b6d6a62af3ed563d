"""Prints contentless names and roundabout phrases, each with a plain alternative.

python -m tests.style docs/http.md src/atoll/http   each hit, as file:line
python -m tests.style                               the counts of every package
python -m tests.style --public                      public docstrings, all packages
    python -m tests.style --update                      lower the counts in ratchet.toml
python -m tests.style --update --moved              ... after moving code
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.style import ratchet
from tests.style.names import name_hits
from tests.style.prose import Hit, prose_hits
from tests.style.tree import (
    assigned_names,
    python_files,
)


def main() -> int:
    """Print hits or counts, or lower the counts; status 1 if something is left."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.style",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files or directories")
    parser.add_argument("--names", action="store_true", help="only names")
    parser.add_argument("--prose", action="store_true", help="only prose")
    parser.add_argument("--public", action="store_true", help="only public docstrings")
    parser.add_argument("--update", action="store_true", help="lower ratchet.toml")
    parser.add_argument(
        "--moved", action="store_true", help="a count may rise if its sum does not"
    )
    options = parser.parse_args()
    if options.update:
        lines = ratchet.update(is_move=options.moved)
    elif options.public:
        hits = ratchet.measure_public()
        lines = [line for section in sorted(hits) for line in hits[section]]
    elif options.paths:
        files = _files(options.paths)
        lines = _hits(files, names=not options.prose, prose=not options.names)
    else:
        lines = _summary()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return bool(lines)


def _hits(files: list[Path], *, names: bool, prose: bool) -> list[str]:
    lines: list[str] = []
    for file in files:
        hits: list[Hit] = name_hits(file) if names and file.suffix == ".py" else []
        hits = [*hits, *(prose_hits(file) if prose else ())]
        lines += map(str, sorted(hits, key=lambda hit: hit.line))
    return lines


def _summary() -> list[str]:
    """Return a table: for each package or page, the counts of every guard."""
    hits_by_guard = {guard: measure() for guard, measure in ratchet.GUARDS.items()}
    totals: Counter[str] = Counter()
    for file in python_files("src"):
        totals[ratchet.section_of(file)] += len(assigned_names(file))
    imports = {section: n.share for section, n in ratchet.lines_by_section().items()}
    lines = [_row("", *hits_by_guard, "names %", "imports %")]
    for section in sorted(
        {*totals, *(key for hits in hits_by_guard.values() for key in hits)}
    ):
        counts = {
            guard: len(hits.get(section, ())) for guard, hits in hits_by_guard.items()
        }
        share = counts["names"] / max(totals[section], 1)
        percents = (f"{share:.1%}", f"{imports.get(section, 0):.1%}")
        lines.append(_row(section, *counts.values(), *percents))
    sums = {
        guard: sum(map(len, hits.values())) for guard, hits in hits_by_guard.items()
    }
    share = sums["names"] / totals.total()
    percents = (f"{share:.1%}", f"{ratchet.import_percent()}%")
    return [*lines, _row("sum", *sums.values(), *percents)]


def _row(section: str, *cells: object) -> str:
    return f"{section:<32}" + "".join(f"{cell!s:>18}" for cell in cells)


def _files(paths: list[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        inside = [*path.rglob("*.py"), *path.rglob("*.md")] if path.is_dir() else [path]
        files += sorted(file.resolve() for file in inside)
    return files


if __name__ == "__main__":
    raise SystemExit(main())
