"""The report is one valid page that loads nothing and believes nobody."""

from __future__ import annotations

import re
import tomllib

import pytest

from atoll import RunSettings
from atoll.demo import report
from atoll.report import sections
from tests.demo.small import SETTINGS, results
from tests.report.pages import HOSTILE, Reader

pytestmark = pytest.mark.torch


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
    assert {"src", "xlink:href", "srcset", "onclick"} & names == set()
    links = [value for name, value in reader.attributes if name == "href"]
    assert all(link is not None and link.startswith("#") for link in links)
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
    text = sections.run_file(results()["settings"])

    assert RunSettings.from_dict(tomllib.loads(text)) == SETTINGS
