"""A run from its first command to its last, in processes, over TLS on loopback."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.cli.runs import ISLAND, atoll, ended, serving, started


def test_a_run_by_its_commands_only(tmp_path: Path) -> None:
    """Serve, invite, join here and as another user, look, export: nothing is typed.

    The coordinator ends by itself with --until-end, when every island has left.
    """
    script = tmp_path / "train.py"
    script.write_text(ISLAND)
    there = tmp_path / "elsewhere"
    with serving(tmp_path, "--until-end") as served:
        code, paste, err = atoll("invite", "lagoon", home=served.home)
        assert code == 0
        assert "listens on this machine only" in err
        words = shlex.split(paste)
        assert words[:2] == ["atoll", "join"]
        assert words[3:] == ["--", "COMMAND"]
        far = started("join", words[2], "--island", "far", "--", script, home=there)
        near = started(
            "join", served.directory, "--island", "near", "--", script, home=served.home
        )
        islands = [ended(near), ended(far)]
        said = {}
        for code, out, err in islands:
            assert code == 0, err
            said.update(dict([out.split()]))
        assert said.keys() == {"near", "far"}
        assert len(set(said.values())) == 1
        assert served.process.wait(60) == 0

    with serving(tmp_path) as again:
        _look_at_the_end(tmp_path, again.home)


def _look_at_the_end(place: Path, home: Path) -> None:
    code, page, _ = atoll("status", "lagoon", home=home)
    assert code == 0
    assert re.match(r"lagoon  ended  round 4 of 4", page)
    assert "\x1b" not in page
    assert [line.split()[0] for line in page.splitlines() if " left " in line] == [
        "far",
        "near",
    ]

    out = place / "weights.safetensors"
    code, told, err = atoll("export", "lagoon", out, "--round", "4", home=home)
    assert (code, err) == (0, "")
    assert told.startswith(f"{out}: round 4, 3 tensors, ")
    weights = load_file(out)
    assert {name: each.shape for name, each in weights.items()} == {
        "h.0.w": (20, 35),
        "h.1.w": (500,),
        "head": (33,),
    }
    assert all(np.abs(each).max() > 0 for each in weights.values())

    code, lines, _ = atoll("events", "lagoon", "--json", home=home)
    assert code == 0
    assert all("event" in json.loads(line) for line in lines.splitlines())
