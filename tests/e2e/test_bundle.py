"""An island that has nothing but a way to the run: model and tokenizer come from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll import RunSettings
from atoll import init as atoll_init
from tests.bundle.samples import WITH_CODE, tiny_config, written
from tests.cli.runs import atoll, serving, started

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

PATIENT_S = 240.0
"""Torch and transformers are loaded anew, on a machine that may be busy."""

TRAIN = """
import os, sys, torch, atoll.torch
assert os.listdir() == []
model = atoll.torch.from_run()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.arange(8)[None]
with atoll.torch.join(model, optimizer) as island:
    while True:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        island.report(tokens=8, loss=loss)
        optimizer.step()
        optimizer.zero_grad()
print(type(model).__name__, island.round)
try:
    atoll.torch.join(model, optimizer, sys.argv[1])
except atoll.errors.ModelError as exc:
    print(exc)
"""
CODE = """
import os, torch, atoll.torch
assert os.listdir() == []
model = atoll.torch.from_run()
print(model)
"""


def island(*arguments: str | Path, **around: Any) -> tuple[int, str, str]:
    """Join as an island, which loads much; return how that ended."""
    process = started(*arguments, **around)
    try:
        out, err = process.communicate(timeout=PATIENT_S)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, out, err


def empty(place: Path) -> tuple[Path, Path]:
    """Return where a user who has nothing keeps configuration, and works."""
    (place / "here").mkdir()
    return place / "nobody", place / "here"


def test_an_island_with_nothing_but_a_url_trains(tmp_path: Path) -> None:
    """In an empty directory, with what an invitation gave; the hub is not asked.

    A model that was built so is refused in a run whose bundle has an edited file.
    """
    files = written(tmp_path / "model", tiny_config("llama"))
    edited = written(tmp_path / "edited", tiny_config("llama", rope_theta=7.0))
    offline = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    values = ("run.start_islands=1", "run.end_rounds=2", "sync.fragment_order=by_size")
    quick = [word for each in values for word in ("--set", each)]
    other = tmp_path / "other"
    atoll_init(str(other), RunSettings(), bundle=edited)
    with serving(tmp_path, "--bundle", files, *quick) as served:
        _, out, _ = atoll("invite", served.url, "--json", home=served.home)
        invitation = json.loads(out)["invite"]
        home, here = empty(tmp_path)
        command = ("--", sys.executable, "-c", TRAIN, other)
        code, out, err = island(
            "join", invitation, *command, home=home, cwd=here, **offline
        )

    trained, refused = out.splitlines()
    assert (code, trained) == (0, "LlamaForCausalLM 2"), err
    assert "so it is another model" in refused


def test_code_of_a_bundle_runs_with_the_flag_only(tmp_path: Path) -> None:
    """Without it the flag is named, with it the model is built."""
    files = written(tmp_path / "model", WITH_CODE)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with serving(tmp_path, "--bundle", files) as served:
        _, here = empty(tmp_path)
        command = ("--", sys.executable, "-c", CODE)
        without = island(
            "join", served.url, *command, home=served.home, cwd=here, **cache
        )
        assert without[0] != 0
        digest = without[2].partition("--trust-code ")[2].split()[0]
        trusted = ("join", served.url, "--trust-code", digest)
        code, out, err = island(*trusted, *command, home=served.home, cwd=here, **cache)

    assert (code, out.startswith("Sequential(")) == (0, True), err
