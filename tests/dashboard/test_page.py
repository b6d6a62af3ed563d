"""The page in a real browser: Debian's Chromium, which Playwright drives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from atoll.dashboard import DashboardServer, Sessions
from atoll.errors import Unreachable
from atoll.run_client import Action
from atoll.runtime import SystemClock
from atoll.settings.reference import references
from tests.dashboard.lagoon import NAMES, LagoonRun, shown
from tests.engines import system_engine

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
    "--disable-sync",
)
PAGES = ("run", "run/islands", "run/rounds", "run/settings", "run/events")
LOOPBACK = "http://127.0.0.1:"


@dataclass
class Window:
    """A browser window that shows a run, and everything it complained about."""

    page: Page
    server: DashboardServer
    sessions: Sessions
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def link(self) -> str:
        """Return a link with a new code."""
        code = self.sessions.make_code(now_s=SystemClock().now_s()).reveal()
        return f"{self.server.url}#c={code}"

    def go(self, path: str) -> None:
        """Open a page of the dashboard."""
        self.page.goto(f"{self.server.url}{path}")
        self.page.wait_for_selector("main .panel")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this file."""
    path = system_engine("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(path), args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def window(browser: Browser, run: LagoonRun, **options: Any) -> Iterator[Window]:
    """Give a window that has used its link; its faults must be none."""
    may_control = options.pop("may_control", True)
    size = {"width": options.pop("width", 1280), "height": 900}
    with shown(run, may_control=may_control) as (server, _, sessions):
        context = browser.new_context(viewport=size, **options)  # type: ignore[arg-type] # its own dict
        page = context.new_page()
        page.set_default_timeout(20_000)
        opened = Window(page, server, sessions)
        page.on("pageerror", lambda error: opened.faults.append(str(error)))
        page.on("console", lambda message: opened.faults.append(message.text))
        page.on("request", lambda request: opened.requests.append(request.url))
        page.goto(opened.link())
        page.wait_for_selector("h1")
        yield opened
        context.close()


@pytest.fixture
def run() -> LagoonRun:
    """A calm run of eight islands."""
    return LagoonRun(rounds=30)


@pytest.fixture
def calm(browser: Browser, run: LagoonRun) -> Iterator[Window]:
    """Its page, without a fault at the end."""
    with window(browser, run) as opened:
        yield opened
        assert opened.faults == []


def waiting(run: LagoonRun) -> None:
    """Let the run wait for an island that is silent."""
    now_unix_s = time.time()
    run.rows["saopaulo-1"] = {"state": "silent", "seen_s": 252.0}
    wait = {"island": "saopaulo-1", "fragment": 1, "round": run.rounds + 1}
    run.changes = {
        "waits_for": [wait | {"since_s": 252.0, "late_in_s": 48.0}],
        "open": [
            {
                "fragment": 1,
                "round": run.rounds + 1,
                "opened_unix_s": now_unix_s - 30,
                "staged": [name for name in NAMES if name != "saopaulo-1"],
                "awaited": ["saopaulo-1"],
                "closes_unix_s": now_unix_s + 48,
            }
        ],
    }


def test_a_link_is_good_once(browser: Browser, run: LagoonRun) -> None:
    """The code leaves the address; a reload keeps the session."""
    with window(browser, run) as opened:
        link = opened.link()
        opened.page.goto("about:blank")
        opened.page.goto(link)
        expect(opened.page.locator("h1")).to_have_text("Training.")
        assert "c=" not in opened.page.url
        opened.page.reload()
        expect(opened.page.locator("h1")).to_have_text("Training.")
        other = browser.new_context()
        page = other.new_page()
        page.goto(link)
        expect(page.locator("h1")).to_have_text("This page is closed")
        expect(page.locator("main")).to_contain_text("was used")
        page.goto(opened.server.url)
        expect(page.locator("h1")).to_have_text("This page needs a link")
        other.close()


def test_nothing_leaves_the_machine(calm: Window) -> None:
    """No page asks another host, or breaks the policy (which the console reports)."""
    for path in PAGES:
        calm.go(path)
    assert calm.requests
    assert all(url.startswith(LOOPBACK) for url in calm.requests)


def test_a_wait_is_said_first(calm: Window, run: LagoonRun) -> None:
    """For whom, how many are here, and when it ends by itself; the time runs."""
    waiting(run)
    heading = calm.page.locator("h1")
    expect(heading).to_contain_text("Waits for saopaulo-1, for 4 min")
    text = calm.page.locator(".now")
    expect(text).to_contain_text("7 of 8 updates are here. It closes by itself in 4")
    expect(text).to_contain_text("No work has been dropped")
    expect(text).to_contain_text("It closes by itself in 3", timeout=25_000)
    expect(calm.page.locator(".badge")).to_have_text("waits")
    expect(calm.page.locator("table.islands tbody tr").first).to_contain_text("silent")


@pytest.mark.parametrize(
    ("changes", "heading", "badge"),
    [
        ({"state": "paused"}, "Paused by an operator.", "paused"),
        ({"state": "ended"}, "The run has ended.", "ended"),
        (
            {"state": "founding", "why": "Waits for the first island."},
            "Waits for the first island.",
            "founding",
        ),
    ],
)
def test_every_state_has_a_sentence(
    calm: Window, run: LagoonRun, changes: dict[str, Any], heading: str, badge: str
) -> None:
    """And a word in the top bar."""
    run.changes = changes
    expect(calm.page.locator("h1")).to_have_text(heading)
    expect(calm.page.locator(".badge")).to_have_text(badge)


def test_a_new_round_appears(calm: Window, run: LagoonRun) -> None:
    """In the bar, in the marks and in the title, without a reload."""
    expect(calm.page.locator(".where")).to_have_text("round 30 of 400")
    run.train("#######.")
    expect(calm.page.locator(".where")).to_have_text("round 31 of 400")
    expect(calm.page.locator(".line")).to_contain_text("2 absent")
    expect(calm.page).to_have_title("31/400 lagoon")


def test_a_run_that_does_not_answer_is_said(browser: Browser, run: LagoonRun) -> None:
    """The last values stay, and it comes back by itself."""
    with window(browser, run) as opened:
        run.error = Unreachable("lagoon does not answer.")
        alert = opened.page.locator(".alert")
        expect(alert).to_contain_text("lagoon does not answer.")
        expect(opened.page.locator(".where")).to_have_text("round 30 of 400")
        run.error = None
        expect(alert).to_have_count(0)


def test_marks_are_walked_by_keys(calm: Window) -> None:
    """Each arrow names another mark, and Enter opens its round."""
    canvas = calm.page.locator(".cells canvas")
    canvas.focus()
    canvas.press("ArrowUp")
    line = calm.page.locator(".line")
    expect(line).to_contain_text("berlin-1, round 30, fragment 1")
    canvas.press("ArrowLeft")
    expect(line).to_contain_text("berlin-1, round 30, fragment 0")
    canvas.press("ArrowDown")
    expect(line).to_contain_text("berlin-2, round 30, fragment 0")
    canvas.press("Enter")
    expect(calm.page.locator("dialog h2")).to_have_text("Round 30, fragment 0")
    expect(calm.page.locator("table.arrivals tbody tr")).to_have_count(8)


def test_pages_are_reached_by_keys(calm: Window) -> None:
    """By their numbers; `?` lists the keys."""
    for key, name in zip(
        "2345", ("islands", "rounds", "settings", "events"), strict=True
    ):
        calm.page.keyboard.press(key)
        expect(calm.page.locator("nav [aria-current]")).to_have_text(name.capitalize())
    calm.page.keyboard.press("?")
    expect(calm.page.locator("dialog")).to_contain_text("filter")


def test_hostile_names_are_text(browser: Browser) -> None:
    """Markup, control characters and long names never become markup."""
    names = ("<img src=x onerror=alert(1)>", "a\u202eb\x1b[31m", 120 * "n")
    run = LagoonRun(rounds=5, names=names)
    with window(browser, run) as opened:
        for path in PAGES:
            opened.go(path)
            assert opened.page.locator("main img").count() == 0
        opened.go("run/islands")
        expect(opened.page.locator("table.islands")).to_contain_text(names[0])
        expect(opened.page.locator("table.islands")).to_contain_text(
            "a\ufffdb\ufffd[31m"
        )
        assert opened.faults == []


def test_an_island_is_shown_with_its_metrics(calm: Window) -> None:
    """A click opens it; the address keeps it."""
    calm.go("run/islands")
    calm.page.get_by_role("button", name="sydney-1").click()
    dialog = calm.page.locator("dialog")
    expect(dialog).to_contain_text("inner steps per window")
    expect(dialog).to_contain_text("lr")
    assert "island=sydney-1" in calm.page.url
    calm.page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_islands_are_filtered_and_sorted(calm: Window, run: LagoonRun) -> None:
    """By name, by trouble and by a column."""
    run.rows["tokyo-2"] = {"late": 3, "loss": 9.5}
    calm.go("run/islands")
    rows = calm.page.locator("table.islands tbody tr")
    calm.page.get_by_role("button", name="late", exact=True).first.click()
    expect(rows).to_have_count(1)
    calm.page.get_by_role("button", name="all", exact=True).click()
    calm.page.get_by_role("button", name="loss").click()
    expect(rows.first).to_contain_text("tokyo-2")
    calm.page.locator("#filter").fill("berlin")
    expect(rows).to_have_count(2)


def test_every_setting_is_listed(calm: Window) -> None:
    """Those that differ from their defaults first."""
    calm.go("run/settings")
    keys = calm.page.locator("table.settings th code").all_text_contents()
    assert sorted(keys) == sorted(row.key for row in references())
    assert keys[:2] == ["run.name", "run.end_rounds"]


def test_events_go_back_to_the_first(calm: Window) -> None:
    """Page by page; filters choose among those that were read."""
    calm.go("run/events")
    older = calm.page.get_by_role("button", name="Older events")
    while older.count():
        with calm.page.expect_response("**/api/events**"):
            older.click()
        expect(calm.page.locator("button:disabled", has_text="Older")).to_have_count(0)
    calm.page.get_by_role("button", name="members").click()
    expect(calm.page.locator(".notes li").last).to_contain_text("tokyo-1 joined")


def test_a_run_is_paused_and_resumed(calm: Window, run: LagoonRun) -> None:
    """By keys alone: the question says what it does, and the command that does it."""
    calm.page.get_by_role("button", name="Pause…").focus()
    calm.page.keyboard.press("Enter")
    dialog = calm.page.locator("dialog")
    expect(dialog).to_contain_text("Nothing is lost.")
    expect(dialog).to_contain_text("atoll control lagoon pause")
    calm.page.get_by_role("button", name="Pause", exact=True).press("Enter")
    expect(dialog).to_contain_text("Done")
    calm.page.keyboard.press("Escape")
    expect(calm.page.locator("h1")).to_have_text("Paused by an operator.")
    calm.page.get_by_role("button", name="Resume…").click()
    calm.page.get_by_role("button", name="Resume", exact=True).click()
    expect(calm.page.locator("h1")).to_have_text("Training.")
    assert [command.action for command in run.commands] == [Action.PAUSE, Action.RESUME]


def test_a_stop_needs_the_name(calm: Window, run: LagoonRun) -> None:
    """Typed in full."""
    calm.page.get_by_role("button", name="Stop…").click()
    button = calm.page.get_by_role("button", name="Stop", exact=True)
    expect(button).to_be_disabled()
    calm.page.locator("dialog input").fill("lagoon")
    button.click()
    expect(calm.page.locator("dialog")).to_contain_text("Done")
    assert [command.action for command in run.commands] == [Action.STOP]


def test_an_eviction_says_its_price(calm: Window, run: LagoonRun) -> None:
    """The inner steps that are lost, and the quorum."""
    waiting(run)
    calm.page.locator(".now").get_by_role("button", name="Evict…").click()
    dialog = calm.page.locator("dialog")
    expect(dialog).to_contain_text("up to 100 inner steps")
    expect(dialog).to_contain_text("7 live islands stay; the quorum is 4")
    calm.page.get_by_role("button", name="Evict", exact=True).click()
    expect(dialog).to_contain_text("Done")
    assert run.commands[0].island == "saopaulo-1"


def test_a_setting_is_checked_before_it_is_set(
    browser: Browser, run: LagoonRun
) -> None:
    """An invalid value cannot be sent, and a newer epoch refuses the change."""
    with window(browser, run) as opened:
        page = opened.page
        opened.go("run/settings")
        page.locator("summary").click()
        row = page.locator("tr", has=page.get_by_text("outer.lr", exact=True))
        row.get_by_role("button").click()
        value = page.locator("dialog input")
        button = page.get_by_role("button", name="Set epoch 2")
        value.fill("-1")
        expect(page.locator("dialog")).to_contain_text("outer.lr")
        expect(button).to_be_disabled()
        value.fill("0.5")
        expect(page.locator("dialog")).to_contain_text("✓ valid")
        expect(page.locator("dialog")).to_contain_text("set outer.lr=0.5")
        button.click()
        expect(page.locator("dialog")).to_contain_text("Done")
        assert run.commands[0].values == {"outer.lr": 0.5}
        page.keyboard.press("Escape")
        expect(page.locator("table.settings").first).to_contain_text("outer.lr")
        row.get_by_role("button").click()
        expect(page.get_by_role("button", name="Set epoch 3")).to_be_enabled()
        run.epoch += 1
        page.get_by_role("button", name="Set epoch 3").click()
        expect(page.locator("dialog")).to_contain_text("Epoch 3 is in force")
        assert len(run.commands) == 1


def test_who_may_only_look_sees_no_controls(browser: Browser, run: LagoonRun) -> None:
    """They are not even built."""
    waiting(run)
    with window(browser, run, may_control=False) as opened:
        for path in PAGES:
            opened.go(path)
            for name in ("Pause…", "Stop…", "Evict…", "Set…", "Add islands…"):
                assert opened.page.get_by_role("button", name=name).count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_fits_its_window(
    browser: Browser, run: LagoonRun, theme: str, width: int
) -> None:
    """No horizontal scrolling, no text below 11 px, and contrast of 4.5 at least."""
    waiting(run)
    with window(browser, run, width=width, color_scheme=theme) as opened:
        for path in PAGES:
            opened.go(path)
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
            assert opened.page.evaluate(SMALL) == []
            assert opened.page.evaluate(FAINT) == []


TEXTS = """
  const texts = [...document.querySelectorAll("main *, header *")].filter(
    (node) => node.offsetParent && !node.disabled &&
      [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()));
"""
SMALL = f"""() => {{ {TEXTS}
  return texts
    .filter((node) => parseFloat(getComputedStyle(node).fontSize) < 11)
    .map((node) => node.outerHTML.slice(0, 80));
}}"""
FAINT = f"""() => {{ {TEXTS}
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const weights = [0.2126, 0.7152, 0.0722];
  const luminance = (colour) =>
    weights.reduce((sum, weight, n) => sum + weight * linear(colour[n] / 255), 0);
  const ground = (node) => {{
    for (let at = node; at; at = at.parentElement) {{
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }}
    return [255, 255, 255];
  }};
  const contrast = (node) => {{
    const a = luminance(parse(getComputedStyle(node).color));
    const b = luminance(ground(node));
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }};
  return texts.filter((node) => contrast(node) < 4.5)
    .map((node) => node.outerHTML.slice(0, 80));
}}"""


def test_a_hundred_islands_are_folded(browser: Browser) -> None:
    """A band instead of lines, rows with trouble instead of all."""
    names = tuple(f"island-{number:03}" for number in range(100))
    run = LagoonRun(rounds=40, names=names)
    run.train(99 * "#" + "!")
    with window(browser, run) as opened:
        labels = opened.page.locator(".marks .names div").all_text_contents()
        assert "island-099" in labels
        assert len(labels) <= 40
        expect(opened.page.locator(".panel", has_text="Who counted")).to_contain_text(
            "that counted in all"
        )
        opened.go("run/islands")
        expect(opened.page.locator("table.islands tbody tr")).to_have_count(60)
        opened.page.get_by_role("button", name="and 40 more").click()
        expect(opened.page.locator("table.islands tbody tr")).to_have_count(100)
        assert opened.faults == []
