"""Owns the report of a run: one page without scripts.

Does not know how a run is reached. Start reading at `run_report`, then `sections`.
"""

from atoll.report.page import Card, ReportSection, html_table, page, preformatted
from atoll.report.record import RunRecord, record_of
from atoll.report.run_report import run_report, run_sections

__all__ = [
    "Card",
    "ReportSection",
    "RunRecord",
    "html_table",
    "page",
    "preformatted",
    "record_of",
    "run_report",
    "run_sections",
]
