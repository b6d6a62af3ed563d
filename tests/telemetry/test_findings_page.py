"""The page of events lists every kind of finding."""

from __future__ import annotations

import re
from pathlib import Path

from tests.telemetry.test_findings import FROM_PAST, FROM_STATUS

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()


def test_the_page_lists_every_kind_with_its_severity() -> None:
    """The table has the kinds of the code, and no others."""
    _, _, below = PAGE.partition("\n## Findings\n")
    section, _, _ = below.partition("\n## ")
    listed = {
        kind: severity
        for kinds, severity in re.findall(r"^\| (`.*`) \| (\w+) \|", section, re.M)
        for kind in re.findall(r"`(\w+)`", kinds)
    }
    tested = {kind: row[1] for kind, row in FROM_STATUS.items()}
    tested |= {kind: row[2] for kind, row in FROM_PAST.items()}

    assert listed == tested
