"""What `atoll simulate` says first and last, to people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pprint import pformat
from textwrap import indent
from typing import Any

from atoll.settings import RunSettings
from atoll.simulate import wording
from atoll.simulate.page import (
    LEGEND,
    TALLY_COLUMNS,
    Line,
    Page,
    table,
    tally_cells,
    wrap,
)
from atoll.simulate.run import LIMIT_S, Simulated
from atoll.simulate.setup import Setup
from atoll.simulate.shrink import as_test
from atoll.simulate.story import Entry, Tally, Tone

MAX_DEATHS = 8
"""So many deaths are listed with what was lost; the others are counted."""

Facts = dict[str, Any]


def heading(setup: Setup, page: Page) -> list[Line]:
    """Return what is about to happen."""
    sync, run = setup.settings.sync, setup.settings.run
    names = " to ".join(dict.fromkeys((setup.islands[0], setup.islands[-1])))
    tokens = f", or {run.end_tokens} tokens" if run.end_tokens is not None else ""
    faults = f": {wording.kinds(setup.plan)}" if setup.plan.faults else ""
    fragments = _plural(sync.num_fragments, "fragment")
    facts = {
        "islands": f"{len(setup.islands)}, {names}, quorum {run.quorum}",
        "rounds": f"{setup.rounds}{tokens}, in {fragments}; {sync.sync_every} inner "
        f"steps each, overlap {sync.overlap_steps}",
        "seed": str(setup.seed),
        "faults": f"{setup.origin}{faults}",
        **({"place": "a bucket, without a coordinator"} if setup.store else {}),
    }
    if page.has_strip:
        facts["marks"] = f"{LEGEND}   (one per island, in order)"
    return [*_listed(facts, page), Line("")]


def summary(
    setup: Setup, page: Page, result: Simulated, tallies: Mapping[str, Tally]
) -> list[Line]:
    """Return what it came to."""
    rows = [["island", *TALLY_COLUMNS, "utilised", "deaths", "anchor"]]
    for island in setup.islands:
        utilised = f"{result.utilisation.get(island, 0.0):.1%}"
        deaths = str(result.deaths.get(island, 0))
        end = result.digests.get(island, "")[:8] or "-"
        rows.append([island, *tally_cells(tallies[island]), utilised, deaths, end])
    done = list(dict.fromkeys(result.rounds))
    rounds = " and ".join(map(str, done)) or "none"
    where = "by fragment" if len(done) > 1 else "in every fragment"
    time = f"{page.time(result.seconds)} of virtual time, {result.events} events"
    facts = {
        "rounds": f"{rounds} of {setup.rounds}, {where}",
        "time": time,
        **_fates(result.tokens),
        "anchor": _agreement(result),
    }
    lines = [Line(""), *map(Line, table(rows)), Line(""), *_listed(facts, page)]
    return [*lines, *_verdict(result, page)]


def _verdict(result: Simulated, page: Page) -> list[Line]:
    if result.violations:
        return [
            line
            for each in result.violations
            for line in _listed({"violated": str(each)}, page, Tone.BAD)
        ]
    held = _listed({"held": "every invariant"}, page, Tone.GOOD)
    if result.digests:
        return held
    is_late = result.seconds >= LIMIT_S
    why = "time ran out" if is_late else "too few islands are left to go on"
    end = {"ended": f"before its last round: {why}"}
    return [*_listed(end, page, Tone.BAD), *held]


def _fates(tokens: Mapping[str, int]) -> dict[str, str]:
    """Return what became of the tokens; each was trained on in every fragment."""
    usual = ("committed", "in hand", "refused", "dropped", "departed")
    lost = {fate: number for fate, number in tokens.items() if fate not in usual}
    words = [
        f"{tokens[fate]} {'counted' if fate == 'committed' else fate}"
        for fate in usual
        if tokens.get(fate)
    ]
    words += [f"{sum(lost.values())} lost with deaths"] if lost else []
    facts = {"tokens": ", ".join(words) + ", over all fragments"} if words else {}
    deaths = [f"{number} as {fate}" for fate, number in lost.items() if number]
    if len(deaths) > MAX_DEATHS:
        deaths[MAX_DEATHS:] = [f"and with {len(deaths) - MAX_DEATHS} more deaths"]
    return {**facts, "lost": "; ".join(deaths)} if deaths else facts


def reproduction(setup: Setup, command: str) -> list[Line]:
    """Return how to see a violation again: the command, and a test to paste."""
    arguments: Facts = {"settings": "SETTINGS", "islands": len(setup.islands)}
    if setup.store:
        arguments["store"] = True
    test = as_test(setup.plan, seed=setup.seed, arguments=arguments)
    values = pformat(_chosen(setup.settings), sort_dicts=False)
    settings = f"SETTINGS = RunSettings.from_dict(\n{indent(values, '    ')}\n)"
    test = test.replace("\n\n\n", f"\n\n{settings}\n\n\n", 1)
    lines = ["", "The same run again:", "", f"    {command}", "", "As a test:", ""]
    lines += ["    from atoll import RunSettings", *indent(test, "    ").splitlines()]
    return [*map(Line, lines)]


def _chosen(settings: RunSettings) -> dict[str, dict[str, Any]]:
    """Return what differs from the defaults, as tables of a run file."""
    usual = RunSettings().to_dict()
    tables = {
        table: {key: v for key, v in values.items() if usual[table].get(key) != v}
        for table, values in settings.to_dict().items()
    }
    return {table: values for table, values in tables.items() if values}


def opening_facts(setup: Setup) -> Facts:
    """Return the first object of the JSON: everything that determines the rest."""
    return {
        "what": "setup",
        "islands": list(setup.islands),
        "rounds": setup.rounds,
        "seed": setup.seed,
        "settings": setup.settings.to_dict(),
        "faults": [{"kind": f.kind, **f.values()} for f in setup.plan.faults],
        **({"store": True} if setup.store else {}),
    }


def entry_facts(entry: Entry) -> Facts:
    """Return the object of one entry; a committed round has its roster."""
    facts: Facts = {
        "what": entry.what,
        "at_s": round(entry.at_s, 6),
        "who": entry.who,
        "text": entry.text,
    }
    if entry.commit is not None:
        facts["fragment"], facts["round"] = entry.commit.fragment, entry.commit.round
        facts["roster"] = dict(entry.commit.verdicts)
    return facts


def closing_facts(
    setup: Setup, result: Simulated, tallies: Mapping[str, Tally]
) -> Facts:
    """Return the last object of the JSON."""
    return {
        "what": "summary",
        "seconds": round(result.seconds, 6),
        "events": result.events,
        "rounds": list(result.rounds),
        "islands": {
            island: {
                **asdict(tallies[island]),
                "utilisation": round(result.utilisation.get(island, 0.0), 6),
                "deaths": result.deaths.get(island, 0),
                "digest": result.digests.get(island),
                "failure": _failure(island, result),
            }
            for island in setup.islands
        },
        "tokens": result.tokens,
        "violations": [str(each) for each in result.violations],
    }


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _listed(
    facts: Mapping[str, str], page: Page, tone: Tone = Tone.PLAIN
) -> list[Line]:
    """Return one line per fact, more where it is long."""
    return [
        Line(f"{'' if at else name:10}{text}", tone)
        for name, said in facts.items()
        for at, text in enumerate(wrap(said, page.width - 10))
    ]


def _agreement(result: Simulated) -> str:
    digests = sorted(set(result.digests.values()))
    islands = _plural(len(result.digests), "island")
    if not digests:
        return "no island saw the end"
    if len(digests) == 1:
        return f"{digests[0]}, on {islands} that saw the end"
    return f"{len(digests)} different ones on {islands}: {', '.join(digests)}"


def _failure(island: str, result: Simulated) -> str | None:
    error = result.failures.get(island)
    return None if error is None else f"{type(error).__name__}: {error}"


def _with_settings(test: str) -> str:
    return f"from atoll import RunSettings\n{test}"
