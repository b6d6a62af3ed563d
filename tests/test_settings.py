"""What a run file may say, and what is answered when it says something else."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import RunSettings
from atoll.algorithm.pace import FULL_FACTOR, factor
from atoll.errors import AtollWarning, SettingsError, UsageError
from atoll.settings import (
    EPOCH_KEYS,
    MAX_RUN_FILE_BYTES,
    AsyncSection,
    OuterSection,
    RunSection,
    SyncSection,
    WireSection,
    parse_assignment,
)

RUN_FILE = """
[run]
name = "tokyo and lima"
quorum = 2
end_rounds = 40

[sync]
sync_every = 50
num_fragments = 4
overlap_steps = 2

[wire]
up = "e3m0"
down = "int8"

[outer]
lr = 1
"""


def set_to(dotted: str, value: object) -> RunSettings:
    """Return default settings with one value changed."""
    return RunSettings().with_values({dotted: value})


def test_defaults_are_those_of_the_run_file() -> None:
    """Settings nobody touched are valid and hold the documented values."""
    made = RunSettings()

    assert (made.run.start_islands, made.run.quorum, made.run.patience) == (1, 1, 3.0)
    assert (made.run.max_islands, made.run.end_rounds) == (None, None)
    assert (made.sync.sync_every, made.sync.num_fragments) == (100, 1)
    assert (made.sync.overlap_steps, made.sync.adopt) == (0, "rebase")
    assert (made.wire.up, made.wire.down) == ("bf16", "bf16")
    assert (made.outer.optimizer, made.outer.merge) == ("nesterov", "mean")
    assert made.limits.max_update_norm == 10.0
    assert made.limits.max_body_bytes == 68_719_476_736  # 64 GiB


def test_a_run_file_becomes_settings(tmp_path: Path) -> None:
    """Every value of a run file is in the settings, and a whole lr is a number."""
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)

    made = RunSettings.from_toml(path)

    assert made.run.name == "tokyo and lima"
    assert (made.run.quorum, made.run.end_rounds) == (2, 40)
    assert made.sync == SyncSection(sync_every=50, num_fragments=4, overlap_steps=2)
    assert made.wire == WireSection(up="e3m0", down="int8")
    assert made.outer.lr == 1.0
    assert isinstance(made.outer.lr, float)


def test_settings_cannot_be_changed_in_place() -> None:
    """Settings are frozen: what a run owns does not move under an island."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunSettings().sync.sync_every = 5  # type: ignore[misc]


def test_values_of_the_outer_step_are_rounded_to_fp32_once() -> None:
    """The outer step sees fp32 values; a dictionary shows the short ones."""
    outer = OuterSection(lr=0.7, momentum=0.9)

    # 0.7 * 2**24 = 11744051.2 and 0.9 * 2**24 = 15099494.4, both 24-bit integers once
    # rounded: 0xb33333 and 0xe66666.
    assert outer.lr == 0xB33333 * 2.0**-24
    assert outer.momentum == 0xE66666 * 2.0**-24
    assert RunSettings(outer=outer).to_dict()["outer"]["lr"] == 0.7


@pytest.mark.parametrize(
    ("up", "expected"),
    [
        ("fp32", False),
        ("bf16", False),
        ("bf16-stochastic", False),
        ("int8", False),
        ("e3m0", True),
        ("topk-2bit", True),
    ],
)
def test_error_feedback_is_on_below_eight_bits(up: str, expected: bool) -> None:
    """Codecs below 8 bits keep what they lost, others do not, unless told."""
    assert WireSection(up=up).error_feedback is expected
    assert WireSection(up=up, error_feedback=not expected).error_feedback is (
        not expected
    )


def test_sgd_has_no_momentum() -> None:
    """Plain SGD has momentum 0.0 without being told."""
    assert OuterSection(optimizer="sgd").momentum == 0.0
    assert OuterSection(optimizer="sgd", momentum=0.0).momentum == 0.0


_SECTION_VALUES = {
    "run.name": st.text("ab é-_.", min_size=1, max_size=20).filter(
        lambda name: name == name.strip()
    ),
    "run.quorum": st.integers(1, 10),
    "run.max_islands": st.integers(10, 100),
    "run.patience": st.floats(0.125, 1e6),
    "run.end_rounds": st.integers(1, 2**40),
    "sync.sync_every": st.integers(10, 2**31 - 1),
    "sync.num_fragments": st.integers(2, 64),
    "sync.fragment_order": st.sampled_from(["strided", "sequential"]),
    "sync.rest": st.sampled_from(["balanced", "own"]),
    "sync.overlap_steps": st.integers(0, 9),
    "wire.up": st.sampled_from(["fp32", "bf16", "int8", "e3m0"]),
    "wire.down": st.sampled_from(["fp32", "bf16", "int8"]),
    "wire.error_feedback": st.booleans(),
    "outer.lr": st.floats(1e-6, 2.0),
    "outer.momentum": st.floats(0.0, 0.999),
    "outer.merge": st.sampled_from(["mean", "radial"]),
    "outer.weight": st.sampled_from(["uniform", "tokens"]),
    "limits.max_update_norm": st.floats(1.0, 1e30),
    "limits.max_body_bytes": st.integers(1, 2**62),
}


@st.composite
def run_settings(draw: st.DrawFn) -> RunSettings:
    """Draw valid settings with any subset of the keys set."""
    keys = draw(st.sets(st.sampled_from(sorted(_SECTION_VALUES))))
    # These two need more than one fragment, or a limit above them.
    keys |= {"sync.num_fragments", "run.max_islands"}
    values = {key: draw(_SECTION_VALUES[key]) for key in sorted(keys)}
    return RunSettings().with_values(values)


@settings(deadline=None)
@given(made=run_settings())
def test_a_dictionary_gives_the_same_settings_back(made: RunSettings) -> None:
    """Settings survive the way through a dictionary, and so does their fingerprint."""
    again = RunSettings.from_dict(made.to_dict())

    assert again == made
    assert again.fingerprint == made.fingerprint


@settings(deadline=None)
@given(made=run_settings(), data=st.data())
def test_the_order_of_keys_does_not_matter(
    made: RunSettings, data: st.DataObject
) -> None:
    """Tables and keys in any order give the same fingerprint."""
    shuffled = {
        table: dict(data.draw(st.permutations(list(values.items()))))
        for table, values in data.draw(st.permutations(list(made.to_dict().items())))
    }

    assert RunSettings.from_dict(shuffled).fingerprint == made.fingerprint


def test_the_fingerprint_is_that_of_its_canonical_lines() -> None:
    """The fingerprint is a SHA-256 anyone can recompute, whatever their Python."""
    made = RunSettings.from_dict(
        {"sync": {"sync_every": 50}, "run": {"name": "é"}, "outer": {"lr": 0.4}}
    )
    # sha256 of 'schema=1\nrun.name="\u00e9"\nsync.sync_every=50', é escaped as in JSON;
    # lr may change during a run and is not in it.
    expected = "ef60ebd8e0248f5afe9edab85f6da6d2af1173d67b68aa3366cf94c3288361b6"

    assert made.fingerprint == expected


def test_settings_left_at_their_defaults_are_not_in_the_fingerprint() -> None:
    """Writing out a default, derived ones too, changes nothing."""
    written = {
        "sync": {"sync_every": 100},
        "wire": {"up": "e3m0", "error_feedback": True},
    }

    assert (
        RunSettings.from_dict(written).fingerprint
        == set_to("wire.up", "e3m0").fingerprint
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("outer.lr", 0.4),
        ("outer.momentum", 0.5),
        ("run.quorum", 2),
        ("run.patience", 5.0),
        ("run.end_rounds", 9),
        ("run.end_tokens", 9),
        ("limits.max_update_norm", 4.0),
        ("limits.max_body_bytes", 4096),
        ("limits.deadline_min_s", 2.0),
        ("limits.deadline_max_s", 60.0),
    ],
)
def test_what_may_change_during_a_run_is_not_in_the_fingerprint(
    key: str, value: object
) -> None:
    """A change of an epoch key leaves the run the same run."""
    assert key in EPOCH_KEYS
    assert set_to(key, value).fingerprint == RunSettings().fingerprint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.name", "other"),
        ("run.start_islands", 2),
        ("run.max_islands", 8),
        ("sync.sync_every", 99),
        ("sync.num_fragments", 2),
        ("sync.fragment_order", "by_size"),
        ("sync.overlap_steps", 1),
        ("sync.adopt", "mix"),
        ("sync.dynamic_local_updates", True),
        ("wire.up", "fp32"),
        ("wire.down", "fp32"),
        ("wire.error_feedback", True),
        ("outer.optimizer", "heavy_ball"),
        ("outer.merge", "radial"),
        ("outer.weight", "tokens"),
    ],
)
def test_what_can_never_change_is_in_the_fingerprint(key: str, value: object) -> None:
    """A change of an immutable key makes another run."""
    assert key not in EPOCH_KEYS
    assert set_to(key, value).fingerprint != RunSettings().fingerprint


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"sync": {"sync_evry": 5}}, r"'sync\.sync_evry' .* mean 'sync\.sync_every'\?"),
        ({"run": {"sync_every": 5}}, r"'run\.sync_every' .* mean 'sync\.sync_every'\?"),
        ({"outer": {"mu": 0.9}}, r"'outer\.mu' is not a setting\. Did you mean '"),
        ({"snyc": {}}, r"'snyc' is not a setting\. Did you mean 'sync'\?"),
        ({"asynchronous": {}}, r"'asynchronous' .* Did you mean 'async'\?"),
        ({"sync_every": 5}, r"'sync_every' .* Did you mean 'sync\.sync_every'\?"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(
    tables: dict[str, Any], message: str
) -> None:
    """A misspelt or misplaced key is an error that says where it belongs."""
    with pytest.raises(SettingsError, match=message):
        RunSettings.from_dict(tables)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sync.sync_every", "fifty", r"sync_every='fifty' must be a whole number from"),
        ("sync.sync_every", True, r"sync_every=True must be a whole number from 1 to"),
        ("sync.sync_every", 50.0, r"sync_every=50\.0 must be a whole number from 1"),
        ("sync.sync_every", None, r"sync_every=None must be a whole number from 1"),
        ("run.patience", "3", r"patience='3' must be a finite number above 0\.0"),
        ("outer.lr", True, r"lr=True must be a finite number above 0\.0"),
        ("wire.error_feedback", 1, r"error_feedback=1 must be true or false"),
        ("run.name", 7, r"run\.name=7 must be 1 to 128 bytes of printable text"),
        ("wire.up", 16, r"wire\.up=16 must be one of fp32, bf16, .*topk-2bit"),
        ("run.end_rounds", [3], r"end_rounds=\[3\] must be a whole number from 1 to"),
    ],
)
def test_a_wrong_type_is_named_with_value_and_what_is_needed(
    key: str, value: object, message: str
) -> None:
    """A value of the wrong type is refused with the key, the value and its type."""
    with pytest.raises(SettingsError, match=message):
        set_to(key, value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("run.name", "", r"run\.name='' must be 1 to 128 bytes of printable text"),
        ("run.name", "é" * 65, r"must be 1 to 128 bytes"),
        ("run.name", "a/b", r"printable text without '/'"),
        ("run.name", "a\nb", r"printable text"),
        ("run.name", " a", r"without blanks at its ends"),
        (
            "run.bundle",
            "00",
            r"run\.bundle='00' must be a digest .* Copy it whole",
        ),
        ("run.start_islands", 0, r"must be a whole number from 1 to 65536"),
        ("run.quorum", 0, r"run\.quorum=0 must be a whole number from 1 to"),
        ("run.max_islands", 65_537, r"run\.max_islands=65537 must be .* to 65536"),
        ("run.patience", 0, r"patience=0 must be a finite number above 0\.0"),
        ("run.patience", float("nan"), r"run\.patience=nan must be a finite number"),
        ("run.end_rounds", 0, r"run\.end_rounds=0 must be a whole number from 1"),
        ("run.end_tokens", 2**63, r"a whole number from 1 to 9223372036854775807"),
        ("sync.sync_every", 0, r"sync\.sync_every=0 must be a whole number from 1"),
        ("sync.num_fragments", 65_536, r"must be a whole number from 1 to 65535"),
        ("sync.overlap_steps", -1, r"must be a whole number from 0 to 2147483647"),
        ("sync.keep_local", 1.5, r"must be a finite number from 0\.0 to 1\.0"),
        ("wire.error_feedback_decay", -0.1, r"error_feedback_decay=-0\.1 must be a"),
        ("outer.lr", 0.0, r"a finite number above 0\.0 and at most 1048576\.0"),
        ("outer.lr", 1e-60, r"outer\.lr=1e-60 must be .* above 0\.0"),  # 0.0 in fp32
        ("outer.lr", 1e39, r"outer\.lr=1e\+39 must be .* at most"),  # beyond fp32
        ("outer.lr", float("inf"), r"outer\.lr=inf must be a finite number"),
        ("outer.momentum", 1.0, r"a finite number from 0\.0 and below 1\.0"),
        ("outer.momentum", 1 - 1e-12, r"outer\.momentum=0\.999999999999 must be"),
        ("limits.max_update_norm", 0.5, r"must be a finite number from 1\.0"),
        ("limits.max_body_bytes", 0, r"max_body_bytes=0 must be a whole number from 1"),
        ("limits.deadline_min_s", 0.0, r"deadline_min_s=0\.0 must be .* above 0\.0"),
        ("limits.deadline_max_s", -1, r"deadline_max_s=-1 must be .* above 0\.0"),
        ("async.buffer", 0, r"async\.buffer=0 must be a whole number from 1 to 65536"),
        ("async.buffer", 65_537, r"async\.buffer=65537 must be .* to 65536"),
        ("async.grace_s", -0.5, r"grace_s=-0\.5 must be .* from 0\.0 to 86400\.0"),
        ("async.grace_s", 86_401, r"grace_s=86401 must be .* from 0\.0 to 86400\.0"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range(
    key: str, value: object, message: str
) -> None:
    """A value out of range is refused with the value and what may be chosen."""
    with pytest.raises(SettingsError, match=message):
        set_to(key, value)


def test_a_number_too_long_to_print_is_named_by_its_size() -> None:
    """Integers beyond a float and beyond Python's digits are settings errors too."""
    # log2(10) = 3.32193: 400 digits need 1329 bits, 5000 need 16610.
    with pytest.raises(SettingsError, match=r"lr=<an integer of 1329 bits> must be"):
        set_to("outer.lr", 10**400)
    with pytest.raises(SettingsError, match=r"<an integer of 16610 bits> must be"):
        set_to("sync.sync_every", 10**5000)


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("wire.up", "bf61", "bf16"),
        ("wire.down", "float32", "fp32"),
        ("sync.adopt", "rebased", "rebase"),
        ("sync.fragment_order", "bysize", "by_size"),
        ("sync.rest", "owned", "own"),
        ("outer.optimizer", "nestorov", "nesterov"),
        ("outer.merge", "trim", "trimmed"),
        ("outer.weight", "token", "tokens"),
        ("sync.mode", "synch", "sync"),
        ("async.staleness", "inverse_sqrt", "inverse_root"),
    ],
)
def test_an_unknown_choice_names_the_nearest_one(
    key: str, value: str, nearest: str
) -> None:
    """A misspelt choice is refused with the choices and the nearest of them."""
    with pytest.raises(
        SettingsError, match=rf"{key}='{value}' is not one of .* mean '{nearest}'\?"
    ):
        set_to(key, value)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"sync": {"sync_every": 10, "overlap_steps": 10}},
            r"overlap_steps=10 must be below sync\.sync_every=10\. Choose at most 9\.",
        ),
        (
            {"sync": {"keep_local": 0.5}},
            r"keep_local=0\.5 has no effect with sync\.adopt='rebase'\. Remove it, or",
        ),
        (
            {"sync": {"rest": "own"}},
            r"needs at least 2 fragments, .*num_fragments=1\. Choose num_fragments=2",
        ),
        (
            {"sync": {"rest": "own", "num_fragments": 4, "fragment_order": "by_size"}},
            r"rest='own' has no meaning with .*'by_size'.* Choose rest='balanced'",
        ),
        (
            {"sync": {"sync_every": 1, "dynamic_local_updates": True}},
            r"dynamic_local_updates=true has no effect .* sync\.sync_every=1: .* raise",
        ),
        (
            {"wire": {"down": "topk-2bit"}},
            r"wire\.down='topk-2bit' is refused: .* Choose 'bf16' or 'int8'",
        ),
        (
            {"wire": {"error_feedback_decay": 0.95}},
            r"error_feedback_decay=0\.95 has no effect .* set error_feedback=true",
        ),
        (
            {"outer": {"optimizer": "sgd", "momentum": 0.9}},
            r"momentum=0\.9 has no effect with outer\.optimizer='sgd'\. Remove it",
        ),
        (
            {"outer": {"optimizer": "adam"}},
            r"'adam' needs outer\.lr: the usual 0\.7 would move each weight by about 0",
        ),
        (
            {"outer": {"merge": "trimmed", "weight": "tokens"}},
            r"'trimmed' drops whole values.*'tokens'.* Choose weight='uniform'",
        ),
        (
            {"run": {"quorum": 5, "max_islands": 4}},
            r"quorum=5 exceeds run\.max_islands=4.* Choose at most 4\.",
        ),
        (
            {"run": {"start_islands": 5, "max_islands": 4}},
            r"start_islands=5 exceeds run\.max_islands=4.* Choose at most 4\.",
        ),
        (
            {"limits": {"deadline_min_s": 9.0, "deadline_max_s": 8.0}},
            r"deadline_min_s=9\.0 exceeds limits\.deadline_max_s=8\.0\. Choose at most",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tables: dict[str, Any], message: str
) -> None:
    """A contradiction is an error with both values and the way out."""
    with pytest.raises(SettingsError, match=message):
        RunSettings.from_dict(tables)


@pytest.mark.parametrize(
    ("key", "value"),
    [("async.buffer", 4), ("async.grace_s", 0.0), ("async.staleness", "inverse")],
)
def test_asynchronous_settings_need_asynchronous_rounds(
    key: str, value: object
) -> None:
    """A key of [async] in a synchronous run is an error, never ignored."""
    with pytest.raises(
        SettingsError,
        match=rf"{key}={value!r} has no effect with sync\.mode='sync'\. Remove it, or",
    ):
        set_to(key, value)


def asynchronous(
    *,
    run: RunSection | None = None,
    outer: OuterSection | None = None,
    **law: Any,
) -> RunSettings:
    """Return the settings of an asynchronous run; `law` is its [async]."""
    return RunSettings(
        run=run or RunSection(),
        sync=SyncSection(mode="async"),
        outer=outer or OuterSection(),
        asynchronous=AsyncSection(**law),
    )


def test_asynchronous_settings_nobody_touched_are_the_documented_ones() -> None:
    """Unset, the buffer and the grace follow the run, and age lowers no weight."""
    made = asynchronous()

    assert made.sync.is_async
    assert not RunSettings().sync.is_async
    assert made.asynchronous == AsyncSection(
        buffer=None, grace_s=None, staleness="none"
    )


def test_asynchronous_settings_are_read_as_they_were_written() -> None:
    """A coordinator and its islands read the tables of an asynchronous run."""
    made = asynchronous(buffer=4, grace_s=2.0, staleness="inverse")

    assert RunSettings.from_dict(made.to_dict()) == made
    with pytest.raises(SettingsError, match=r"run\.decay_round=3 has no meaning"):
        made.with_values({"run.decay_round": 3})


def test_staleness_none_is_not_written() -> None:
    """Settings of a run without staleness have the tables they always had."""
    assert "async" not in RunSettings().to_dict()
    assert "async" not in asynchronous(staleness="none").to_dict()
    assert asynchronous(staleness="inverse").to_dict()["async"] == {
        "staleness": "inverse"
    }
    assert asynchronous(staleness="none").fingerprint == asynchronous().fingerprint
    assert asynchronous(staleness="inverse").fingerprint != asynchronous().fingerprint


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: asynchronous(outer=OuterSection(optimizer="heavy_ball")),
            r"'heavy_ball' does not work .* defined for nesterov and sgd\. Choose one",
        ),
        (
            lambda: asynchronous(outer=OuterSection(optimizer="adam", lr=0.001)),
            r"'adam' does not work with sync\.mode='async': delayed Nesterov is",
        ),
        (
            lambda: asynchronous(
                outer=OuterSection(merge="trimmed"), staleness="inverse"
            ),
            r"staleness='inverse' .* a trimmed mean knows no weights\. Choose",
        ),
        (
            lambda: asynchronous(run=RunSection(decay_round=3)),
            r"decay_round=3 .* has no fixed steps\. Use run\.end_tokens and WSD\(unit=",
        ),
    ],
)
def test_settings_without_a_meaning_in_asynchronous_rounds_are_refused(
    make: Callable[[], RunSettings], message: str
) -> None:
    """What delayed Nesterov and rounds without fixed steps cannot do is an error."""
    with pytest.raises(SettingsError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: asynchronous(outer=OuterSection(optimizer="sgd"), buffer=1),
        lambda: asynchronous(outer=OuterSection(momentum=0.5), buffer=1),
        lambda: asynchronous(run=RunSection(quorum=2), buffer=1),
        lambda: asynchronous(outer=OuterSection(merge="trimmed"), staleness="none"),
        # Rounds then close when all islands are there.
        lambda: asynchronous(grace_s=86_400),
        lambda: asynchronous(buffer=65_536, staleness="exponential"),
    ],
)
def test_asynchronous_settings_with_a_meaning_are_accepted_in_silence(
    make: Callable[[], RunSettings],
) -> None:
    """The edges of the rules, and the remedies that messages advise, are accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert make().sync.is_async


def test_momentum_on_single_updates_warns() -> None:
    """A buffer of 1 with a quorum of 1 is warned about, at the caller's line."""
    with pytest.warns(
        AtollWarning,
        match=r"buffer=1 with run\.quorum=1 and outer\.momentum=0\.9: .* 14\.6 against "
        r"1\.98\)\. Leave async\.buffer unset",
    ) as caught:
        RunSettings(sync=SyncSection(mode="async"), asynchronous=AsyncSection(buffer=1))

    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]


def test_the_kinds_of_staleness_are_those_of_the_algorithm() -> None:
    """Every value of async.staleness has a factor, and an unknown one has none."""
    for kind in ("none", "inverse", "inverse_root", "exponential"):
        assert factor(AsyncSection(staleness=kind).staleness, 0) == FULL_FACTOR


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"sync": {"adopt": "mix", "overlap_steps": 3, "sync_every": 20}},
            r"discards the 3 inner steps made in flight out of every 20\. .*'rebase'",
        ),
        (
            {"wire": {"up": "topk-2bit"}},
            r"up='topk-2bit' with outer\.momentum=0\.9 diverged .*optimizer='sgd'",
        ),
        ({"wire": {"down": "e3m0"}}, r"down='e3m0' is lossy: .* Choose 'int8'"),
    ],
)
def test_settings_that_cost_something_warn_with_their_names(
    tables: dict[str, Any], message: str
) -> None:
    """A valid but costly combination is allowed and said aloud."""
    with pytest.warns(AtollWarning, match=message):
        RunSettings.from_dict(tables)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SyncSection(adopt="mix", overlap_steps=3),
        lambda: WireSection(down="e3m0"),
        lambda: RunSettings(wire=WireSection(up="topk-2bit")),
    ],
)
def test_a_warning_points_at_the_line_that_makes_the_section(
    make: Callable[[], object],
) -> None:
    """A warning names the caller's file, not ours."""
    with pytest.warns(AtollWarning) as caught:
        make()

    assert [Path(each.filename) for each in caught] == [Path(__file__)]


@pytest.mark.parametrize(
    "tables",
    [
        {"sync": {"adopt": "mix", "overlap_steps": 3, "keep_local": 0.5}},
        {"wire": {"up": "topk-2bit"}, "outer": {"optimizer": "sgd", "lr": 1.0}},
        {"wire": {"up": "e3m0", "down": "int8"}},
        {"outer": {"optimizer": "adam", "lr": 0.001}},
    ],
)
def test_the_remedies_themselves_are_accepted_in_silence(
    tables: dict[str, Any],
) -> None:
    """What a message advises raises no warning of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert RunSettings.from_dict(tables).to_dict()


def test_with_values_leaves_the_rest_alone() -> None:
    """Changing one value keeps the others, and derived defaults follow it."""
    made = RunSettings.from_dict({"sync": {"sync_every": 50}, "run": {"quorum": 2}})

    changed = made.with_values({"sync.overlap_steps": 4, "wire.up": "e3m0"})

    assert changed.sync == SyncSection(sync_every=50, overlap_steps=4)
    assert changed.run == made.run
    assert changed.wire.error_feedback is True
    assert made.sync.overlap_steps == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sync.sync_every=50", ("sync.sync_every", 50)),
        ("outer.lr = 1e-3", ("outer.lr", 0.001)),
        ("wire.error_feedback=true", ("wire.error_feedback", True)),
        ("sync.adopt=mix", ("sync.adopt", "mix")),
        ("run.name='a = b'", ("run.name", "a = b")),
        ("run.name=2026-01-01", ("run.name", "2026-01-01")),
        ("run.name=a\nb = 2", ("run.name", "a\nb = 2")),
        ("run.name=1\nquorum = 2", ("run.name", "1\nquorum = 2")),
        ("run.name=", ("run.name", "")),
        ("run.end_rounds=none", ("run.end_rounds", None)),
        ("run.end_tokens = none", ("run.end_tokens", None)),
        ("async.grace_s=none", ("async.grace_s", None)),
        ("async.staleness=none", ("async.staleness", "none")),
        ("run.name=none", ("run.name", "none")),
        ("store.decider='none'", ("store.decider", "none")),
        ("lagoon.depth=none", ("lagoon.depth", "none")),
        ("none=none", ("none", "none")),
    ],
)
def test_an_assignment_has_a_key_and_a_value(
    text: str, expected: tuple[str, object]
) -> None:
    """KEY=VALUE gives TOML's scalars, and text as it stands otherwise."""
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["sync.sync_every", "=50", ""])
def test_what_is_no_assignment_is_refused_with_an_example(text: str) -> None:
    """Text without key or equals sign says how an assignment is written."""
    with pytest.raises(SettingsError, match=r"Write KEY=VALUE, for example sync\."):
        parse_assignment(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[run]\nquorum = \n", r"is not valid TOML: .*line 2"),
        (b'[run]\nname = "abc', r"is not valid TOML: .*line"),
        (b"[run]\n[run]\n", r"is not valid TOML: .*line 2"),
        (b"[run]\nname = '\xff'\n", r"not UTF-8 text: byte 0xff in line 2\. Save it"),
        (b"a = " + b"[" * 100_000, r"is not valid TOML: .*line"),
        (b"[run]\nquorum = " + b"9" * 5000, r"is not valid TOML: .*line"),
    ],
)
def test_a_run_file_that_does_not_parse_names_file_and_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    """Broken text is a settings error with the file's name and a line."""
    path = tmp_path / "broken.toml"
    path.write_bytes(content)

    with pytest.raises(SettingsError, match=r"broken\.toml'" + r"[\s\S]*" + message):
        RunSettings.from_toml(path)


def test_a_run_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """A file beyond one MiB is refused before it is parsed."""
    path = tmp_path / "large.toml"
    path.write_bytes(b"#" * (MAX_RUN_FILE_BYTES + 1))

    with pytest.raises(SettingsError, match=r"is larger than 1048576 bytes\. A run"):
        RunSettings.from_toml(path)


def test_a_run_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    """A missing file and a directory are the caller's mistakes, named as such."""
    with pytest.raises(UsageError, match=r"absent\.toml' cannot be read: No such file"):
        RunSettings.from_toml(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match=r"cannot be read: Is a directory\. Check"):
        RunSettings.from_toml(tmp_path)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"run": 5}, r"run needs a table of settings, but got 5 \(int\)"),
        ({"run": [{}]}, r"run needs a table of settings, but got \[\{\}\] \(list\)"),
        ([], r"settings needs a table of tables, but got \[\] \(list\)"),
    ],
)
def test_what_is_no_table_is_refused(tables: Any, message: str) -> None:
    """A value where a table belongs is named with its type."""
    with pytest.raises(SettingsError, match=message):
        RunSettings.from_dict(tables)


def test_a_dictionary_in_place_of_a_section_is_refused() -> None:
    """The constructor takes sections; dictionaries go through `from_dict`."""
    with pytest.raises(SettingsError, match=r"sync needs SyncSection, but got \{"):
        RunSettings(sync={"sync_every": 5})  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    tables=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda values: (
            st.lists(values, max_size=3)
            | st.dictionaries(
                st.sampled_from(["run", "sync", "wire", "name", "quorum", "x"]),
                values,
                max_size=3,
            )
        ),
        max_leaves=8,
    )
)
def test_any_dictionary_gives_settings_or_a_settings_error(tables: Any) -> None:
    """Nothing a file can hold raises anything but a settings error."""
    try:
        made = RunSettings.from_dict(tables)
    except SettingsError:
        return

    assert RunSettings.from_dict(made.to_dict()) == made


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    """Neither hash randomisation nor a second interpreter changes a fingerprint."""
    code = (
        "from atoll import RunSettings\n"
        "values = {'wire.up': 'e3m0', 'sync.adopt': 'mix', 'sync.keep_local': 0.3}\n"
        "print(RunSettings().with_values(values).fingerprint)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "17"},
    )

    made = RunSettings().with_values(
        {"sync.keep_local": 0.3, "sync.adopt": "mix", "wire.up": "e3m0"}
    )
    assert other.stdout.strip() == made.fingerprint
