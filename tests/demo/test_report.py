"""The report is one valid page that loads nothing and believes nobody."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser

import pytest

from atoll import RunSettings
from atoll.demo import report
from atoll.demo import report as svg
from tests.demo.small import SETTINGS, results

pytestmark = pytest.mark.torch

VOID = {"meta"}
HOSTILE = "<script>alert('1')</script>\"&"


class Reader(HTMLParser):
    """Notes every element, and what was not closed in its order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.misplaced: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.misplaced.append(tag)


@pytest.mark.parametrize("compares", [True, False])
def test_every_element_is_closed_in_its_place(compares: bool) -> None:
    """With and without the comparison the page is well-formed."""
    reader = Reader(report.page(results(compares=compares)))

    assert reader.misplaced == reader.open == []
    assert reader.tags.count("h1") == 1
    assert reader.tags.count("table") == 1


def test_the_page_loads_nothing() -> None:
    """No script, no address, no import: it can be mailed, and opened without a net."""
    page = report.page(results())
    reader = Reader(page)

    loading = {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert loading & set(reader.tags) == set()
    names = {name for name, _ in reader.attributes}
    assert {"src", "href", "xlink:href", "srcset", "onclick"} & names == set()
    assert re.findall(r"https?://|//\w|@import|url\(", page) == []


def test_hostile_names_are_only_names() -> None:
    """What an island, a run or a model says appears as text, never as an element."""
    found = results()
    found["islands"][0]["island"] = HOSTILE
    found["islands"][0]["sample"] = HOSTILE
    found["islands"][0]["versions"] = {HOSTILE: HOSTILE}
    found["settings"]["run"]["name"] = HOSTILE
    assert found["coordinator"] is not None
    found["coordinator"]["run"] = HOSTILE
    reader = Reader(page := report.page(found))

    assert "script" not in reader.tags
    assert "<script" not in page
    assert reader.misplaced == reader.open == []


def test_the_sentence_says_how_the_losses_compare() -> None:
    """2.2 beside 2.0 is 10 % above, 1.9 is 5 % below, and equal is equal."""
    found = results()
    assert found["parallel"] is not None
    found["parallel"]["loss"] = 2.0

    def said(loss: float) -> str:
        found["loss"] = loss
        return report.sentence(found)

    assert said(2.2).endswith("and ended 10.0 % above its loss.")
    assert said(1.9).endswith("and ended 5.0 % below its loss.")
    assert said(2.0).endswith("and ended with the same loss.")


def test_without_a_comparison_nothing_is_claimed_about_loss() -> None:
    """The sentence stops at the bytes, which need no second training."""
    assert report.sentence(results(compares=False)).endswith("does in bf16.")


def test_the_settings_are_a_run_file() -> None:
    """What the page shows can be used again."""
    text = report.run_file(results()["settings"])

    assert RunSettings.from_dict(tomllib.loads(text)) == SETTINGS


def test_labels_do_not_touch() -> None:
    """Three at one place are moved apart, about where they were, in their order."""
    assert svg.apart([50.0, 50.0, 50.0], gap=10) == [40.0, 50.0, 60.0]
    assert svg.apart([0.0, 100.0], gap=10) == [0.0, 100.0]


def test_ticks_are_round_numbers_inside() -> None:
    """Between 1.71 and 2.62 they are fifths."""
    assert svg.ticks(1.71, 2.62) == pytest.approx([1.8, 2.0, 2.2, 2.4, 2.6])
    assert svg.ticks(3.0, 3.0) == [3.0]
