"""The page of a status: what it says, and that it fits and does no harm."""

from __future__ import annotations

import doctest
import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from atoll.telemetry import render_status
from atoll.telemetry import text as amounts
from atoll.telemetry import text as cells
from atoll.telemetry.status_page import MAX_ISLANDS
from tests.telemetry.statuses import committed, island, status, trouble

HOSTILE = "x\x1b[2J\x1b]0;own\x07\r\n\u202e\u2028\x9b31m"


def page(document: dict[str, object], width: int = 100, *, is_all: bool = False) -> str:
    """Return a page without colours."""
    return render_status(document, width=width, is_colour=False, is_all=is_all)


def test_the_headline_says_how_far_the_run_is() -> None:
    """Name, state, round with a bar, tokens; then members, agreement and age."""
    agreement = {"round": 6, "digest": "a3c5e7cc01", "holding": 1, "of": 1, "apart": []}
    document = status(
        island("i0"), island("i1", state="left"), agreement=agreement, quorum=2
    )
    first, second, *_ = page(document).splitlines()

    # 6 of 40 rounds are 15 %, and 3.6 of 24 cells.
    bar = "━" * 4 + "─" * 20
    assert first == f"demo  training  round 6 of 40 {bar} 15 %, 123k tokens"
    assert second == (
        "1 of 2 islands live, quorum 2, utilisation 92 %, same anchor on 1 of 1 "
        "(a3c5e7cc), run 1 h 0 min old"
    )


@pytest.fixture
def utc() -> Iterator[None]:
    """Make UTC the local time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_the_headline_shows_rate_and_end(utc: None) -> None:
    """The end as a span, and as local time with its date if it is far."""
    near = status(tokens_per_s=352_000.0, ends_unix_s=1_700_003_600.0 + 10_925)
    far = near | {"ends_unix_s": 1_700_003_600.0 + 3 * 86_400}

    # 1_700_003_600 is 2023-11-14 23:13:20
    assert "352k tokens/s, ends in about 3 h 2 min (at 02:15)" in page(near, 200)
    assert "ends in about 3 d 0 h (at Fri 17 Nov 23:13)" in page(far, 200)
    # SOON: the time of day would only repeat it.
    assert "ends in about 30.0 s\n" in page(status(ends_unix_s=1_700_003_630.0), 200)


def test_the_end_that_is_nearer_decides_the_bar() -> None:
    """Half of the tokens are nearer than 15 % of the rounds; a bar may be ASCII."""
    document = status(tokens=1000, end_tokens=2000)
    text = render_status(document, width=100, is_colour=False, is_ascii=True)

    assert "#" * 12 + "-" * 12 + " 50 %, 1000 of 2000 tokens (50 %)" in text


def test_islands_that_hold_another_anchor_are_not_called_the_same() -> None:
    """Islands that are behind are counted; islands that differ are an alarm."""
    agreement = {"round": 6, "digest": "a3c5e7cc", "holding": 2, "of": 5, "apart": []}
    behind = page(status(island("i0"), agreement=agreement), 200)
    apart = page(status(island("i0"), agreement=agreement | {"apart": ["i0"]}), 200)

    assert "same anchor on 2 of 5 (a3c5e7cc), 3 one round or more behind" in behind
    assert "same anchor" not in apart
    assert "Islands hold different anchors." in apart


def test_marks_of_the_last_rounds_are_the_first_column_to_go() -> None:
    """With their legend, on a wide terminal only."""
    marks = "########~~#!...#########"
    document = status(island("i0", marks=marks))

    assert re.search(rf"^i0 .* {re.escape(marks)}$", page(document, 160), re.M)
    assert "# counted, ~ late" in page(document, 160)
    assert marks not in page(document, 80)
    assert "# counted" not in page(document, 80)


def test_trends_of_losses_have_one_scale() -> None:
    """Of all islands together; an unknown loss is a gap, and ASCII has no trends."""
    document = status(island("i0"), island("i1"))
    losses = {"i0": [3.0, 2.0, None, 1.0], "i1": [None, 2.0, 1.5, 1.0]}

    def drawn(width: int, *, is_ascii: bool = False) -> str:
        return render_status(
            document, width=width, is_colour=False, is_ascii=is_ascii, losses=losses
        )

    # Between 1 and 3 the heights are eighths: 2.0 is the fifth, 1.5 the third.
    assert re.search(r"^i0 .* 1\.930   █▅ ▁  ", drawn(160), re.M)
    assert re.search(r"^i1 .* 1\.930    ▅▃▁  ", drawn(160), re.M)
    assert "trend" not in drawn(80)
    assert "trend" not in drawn(160, is_ascii=True)


def test_a_version_is_shown_if_an_island_has_another() -> None:
    """Else the version of the coordinator, in the address, is that of all."""
    same, other = status(island("i0")), status(island("i0", version="0.0.9"))

    assert "version" not in page(same, 120)
    assert re.search(r"^i0 .* 0\.0\.9$", page(other, 120), re.M)


def test_the_page_says_why_the_run_waits() -> None:
    """For whom, since when, how long still, and what would cure it."""
    text = page(trouble(4))

    assert "Waits for tokyo-0, which has not published round 7" in text
    assert "tokyo-0, fragment 2, round 7: for 1 min 15 s, late in 4.5 s" in text
    assert "Cure: Waiting costs 41 % of the time" in text


def test_a_run_that_waits_for_nothing_says_nothing_of_waiting() -> None:
    """No empty headings."""
    text = page(status(island("i0")))

    assert "Cure" not in text
    assert "\n\n\n" not in text


def test_an_island_is_a_row() -> None:
    """State, round, pace, loss, wait, bytes up and down, tokens per second."""
    text = page(status(island("i0")))

    (row,) = re.findall(r"^i0 .*$", text, flags=re.MULTILINE)
    for said in ("live", "12.4 s", "1.930", "2 %", "12.3 MB", "23.5 MB", "47.0k"):
        assert said in row


def test_windows_and_shares_are_shown_where_they_differ() -> None:
    """A pace is the seconds of a window; equal windows and weights need no column."""
    rows = [
        island("i0", step_s=0.1, window=100, share=0.75),
        island("i1", step_s=0.57, window=17, share=0.25),
    ]
    plain = page(status(*[row | {"window": 100, "share": None} for row in rows]))
    text = page(status(*rows))

    assert re.search(r"^island +state +round +pace +window +share ", text, re.M)
    # 100 * 0.1 s, and 17 * 0.57 s
    assert re.search(r"^i0 +live +6 +10\.0 s +100 +75 % ", text, re.M)
    assert re.search(r"^i1 +live +6 +9\.7 s +17 +25 % ", text, re.M)
    assert re.search(r"^island +state +round +pace +loss ", plain, re.M)
    assert re.search(r"^i1 +live +6 +57\.0 s +1\.930 ", plain, re.M)


def test_a_status_of_an_older_coordinator_is_shown() -> None:
    """It has neither paces nor windows."""
    new = {"step_s", "window", "share"}
    row = {key: value for key, value in island("i0").items() if key not in new}
    document = status(row)
    del document["sync_every"]

    assert "12.4 s" in page(document)


def test_a_refused_island_is_told_with_its_reason() -> None:
    """The reason of a poisoned update is on the page."""
    text = page(trouble(4))

    assert "tokyo-1 was refused: norm: 812.1 is 40.6 times the median" in text


def test_islands_with_the_same_data_are_named() -> None:
    """With what to do about it, and not more names than fit."""
    names = [f"i{number}" for number in range(10)]
    told = " ".join(page(status(same_data=[["a", "b"], names])).split())

    assert "a, b have begun with the same batch: give each its own rows" in told
    assert "i7 and 2 more have begun" in told


def test_rows_of_no_island_are_shown_with_the_setting() -> None:
    """Of eight parts, two islands have two."""
    text = " ".join(page(status(unowned_share=0.75)).split())

    assert "75 % of the rows belong to no island" in text
    assert "run.max_islands" in text
    assert "belong to no island" not in page(status(unowned_share=0.0))


def test_a_budget_of_tokens_shows_its_share() -> None:
    """With the rate and the time that is left, which follow from the past."""
    text = page(status(tokens=812e6, end_tokens=2_000_000_000), width=200)

    assert "812M of 2.00G tokens (41 %)" in text


def test_an_asynchronous_run_shows_ages_in_place_of_late_updates() -> None:
    """No update is late there; the headline has the mean of the islands' ages."""
    islands = [island("i0", age=1.05), island("i3", age=9.8), island("i4")]
    text = page(status(*islands, mode="async", recent=[]))

    assert "asynchronous, age 5.4" in text.replace("\n", " ")
    (head,) = re.findall(r"^island .*$", text, flags=re.MULTILINE)
    assert "age" in head
    assert "late" not in head
    assert "late" in page(status(island("i0")))
    assert " age" not in page(status(island("i0")))


def test_damage_is_told() -> None:
    """What the journal could do without is said in words."""
    assert "Damage: snapshot 3 is torn." in page(status(damage=["snapshot 3 is torn."]))


def test_counts_of_a_round_are_whole_numbers() -> None:
    """Also those that the past of an ended run holds as floats."""
    row = committed(6, counted=2.0, late=0.0, refused=1.0)
    text = page(status(recent=[row]))

    assert re.search(r"^ +6 +0 +2 +0 +1 ", text, re.M)


def test_an_empty_run_has_a_page() -> None:
    """Before anybody came there is a headline and a reason."""
    empty = status(
        state="founding",
        why="Waits for 4 islands.",
        round=0,
        rounds=[],
        last_round=None,
        recent=[],
        stall_share=None,
    )

    assert page(empty).splitlines() == [
        "demo  founding  round 0, 123k tokens",
        "no islands, quorum 1, utilisation 92 %, run 1 h 0 min old",
        "demo-abcdef123456 at https://127.0.0.1:4711, Atoll 0.1.0",
        "",
        "Waits for 4 islands.",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("count", [1, 2, 8, 40])
def test_no_line_is_wider_than_the_terminal(width: int, count: int) -> None:
    """On a narrow one the least important columns go first."""
    text = page(trouble(count), width)

    assert max(map(cell_len, text.splitlines())) <= width
    assert "loss" in text


def test_at_eighty_columns_every_promised_column_is_there() -> None:
    """A usual terminal shows all that status promises of an island."""
    text = page(trouble(8), 80)

    for head in ("state", "round", "pace", "loss", "wait", "up", "down", "tokens/s"):
        assert re.search(rf"^island .*\b{head}\b", text, flags=re.MULTILINE), head


def test_wide_names_keep_the_columns_straight() -> None:
    """A name of wide characters takes the cells that a terminal gives it."""
    names = ["東京一号機", "i1", "e\u0301mile", "한국", "😀"]
    text = page(status(*map(island, names)))

    rows = [line for line in text.splitlines() if " live " in line]
    assert len(rows) == len(names)
    assert len({cell_len(row.partition(" live ")[0]) for row in rows}) == 1


def test_many_islands_are_cut_with_trouble_first() -> None:
    """Of a thousand islands those are listed that need a look."""
    crowd = [island(f"i{n}") for n in range(1000)] + [island("lost", state="silent")]
    text = page(status(*crowd), is_all=True)

    assert f"and {1001 - MAX_ISLANDS} more islands" in text
    assert re.search(r"^island .*\nlost ", text, flags=re.MULTILINE)


def test_hostile_text_is_shown_by_its_numbers() -> None:
    """Nothing that another machine wrote moves the cursor or forges a line."""
    hostile = island(HOSTILE, version=HOSTILE, state=HOSTILE, refused_because=HOSTILE)
    wait = {"island": HOSTILE, "fragment": 0, "round": 1, "since_s": 1.0}
    text = page(
        status(
            hostile,
            name=HOSTILE,
            run=HOSTILE,
            state=HOSTILE,
            why=HOSTILE,
            cure=HOSTILE,
            damage=[HOSTILE],
            version=HOSTILE,
            listening=HOSTILE,
            waits_for=[wait | {"late_in_s": None}],
        )
    )

    assert text.replace("\n", "").isprintable()
    assert r"x\x1b[2J" in text
    assert r"\u202e" in text


@given(st.text(), st.integers(min_value=40, max_value=200))
def test_any_name_is_printable_and_fits(name: str, width: int) -> None:
    """Whatever a run and its islands are called, the page stays a page."""
    document = status(island(name, version=name), name=name, why=name, run=name)
    text = page(document, width)

    assert text.replace("\n", "").isprintable()
    assert all(cells.width_of(line) <= width for line in text.splitlines())


def test_colours_change_nothing_but_colours() -> None:
    """Without its colours the page is the plain one."""
    for document in (trouble(4), status(island(HOSTILE))):
        painted = render_status(document, width=80, is_colour=True)

        assert "\x1b[" in painted
        assert re.sub(r"\x1b\[\d+m", "", painted) == page(document, 80)


def test_only_the_last_rounds_are_listed() -> None:
    """Fifty rounds in a document are eight on the page, the newest last."""
    text = page(status(recent=[committed(number) for number in range(1, 51)]))

    table = text[text.index("round  fragment") :].splitlines()[1:]
    assert [int(line.split()[0]) for line in table] == list(range(43, 51))


@pytest.mark.parametrize("module", [amounts, cells], ids=lambda each: each.__name__)
def test_examples_in_docstrings_hold(module: object) -> None:
    """What the docstrings show is what happens."""
    found = doctest.testmod(module)  # type: ignore[arg-type] # a module is an object

    assert found.attempted
    assert not found.failed
