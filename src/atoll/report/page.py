"""The frame of a report: one HTML page that needs no other file.

It has no script, no font, no picture and no style from elsewhere; text from other
machines, such as an island's name, is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

MARK = (
    '<svg class="mark" viewBox="0 0 48 48" aria-hidden="true">'
    '<circle cx="24" cy="24" r="17"/>'
    '<circle class="isle" cx="24" cy="7" r="5"/>'
    '<circle class="isle" cx="41" cy="24" r="5"/>'
    '<circle class="isle" cx="24" cy="41" r="5"/>'
    '<circle class="isle" cx="7" cy="24" r="5"/></svg>'
)


@dataclass(frozen=True)
class ReportSection:
    """One part of the page."""

    heading: str
    text: str
    inside: str
    """HTML."""

    def html(self, number: int) -> str:
        """Return the part, which the list of contents links to by its number."""
        return (
            f'<section id="s{number}"><h2>{escape(self.heading)}</h2>\n'
            f'<p class="words">{escape(self.text)}</p>\n{self.inside}</section>'
        )


@dataclass(frozen=True)
class Card:
    """One figure at the top of the page."""

    figure: str
    label: str
    detail: str

    def html(self) -> str:
        """Return the card."""
        return (
            f'<div class="card"><p class="big">{escape(self.figure)}</p>'
            f'<p class="what">{escape(self.label)}</p>'
            f'<p class="more">{escape(self.detail)}</p></div>'
        )


def page(
    title: str,
    *,
    eyebrow: str,
    lead: str,
    cards: Sequence[Card],
    sections: Sequence[ReportSection],
) -> str:
    """Return the whole page."""
    style = files("atoll.report").joinpath("report.css").read_text()
    contents = "".join(
        f'<a href="#s{number}">{escape(section.heading)}</a>'
        for number, section in enumerate(sections)
    )
    parts = [
        f'<header>{MARK}<div><p class="eyebrow">{escape(eyebrow)}</p>'
        f"<h1>{escape(title)}</h1></div></header>",
        f'<p class="lead">{escape(lead)}</p>',
        f'<section class="cards">{"".join(card.html() for card in cards)}</section>',
        f"<nav>{contents}</nav>",
        *(section.html(number) for number, section in enumerate(sections)),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Atoll: {escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def html_table(
    heading: Sequence[str], rows: Sequence[Sequence[str]], style: str = "figures"
) -> str:
    """Return a table whose first column names the rows."""

    def line(cells: Sequence[str], tag: str) -> str:
        first, *rest = map(escape, cells)
        return (
            f"<tr><th>{first}</th>{''.join(f'<{tag}>{c}</{tag}>' for c in rest)}</tr>"
        )

    body = "".join(line(row, "td") for row in rows)
    return (
        f'<div class="scroll {style}"><table><thead>{line(heading, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def preformatted(*blocks: str) -> str:
    """Return blocks of text, escaped and unchanged."""
    inside = "".join(f"<pre>{escape(block.strip())}</pre>" for block in blocks)
    return f'<div class="tables">{inside}</div>' if len(blocks) > 1 else inside
