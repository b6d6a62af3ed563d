"""What a bundle says of itself: what it leaves out, what is code, what makes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from atoll.bundle import Bundle, defined_by
from atoll.bundle.directory import load_factory
from atoll.errors import SettingsError, UsageError
from atoll.exchange.api import model_fingerprint
from atoll.settings import RunSettings
from atoll.testing.fixtures import MODEL
from tests.bundle.samples import PLAIN, WITH_CODE, a_bundle, written


def test_hidden_files_and_caches_are_left_out(tmp_path: Path) -> None:
    """What tools leave behind is no part of a definition."""
    written(tmp_path, PLAIN)
    written(tmp_path, {".git/config": b"x", "__pycache__/a.pyc": b"x", ".env": b"x"})

    assert Bundle.of_directory(tmp_path).files == PLAIN


def test_weights_in_a_directory_are_refused(tmp_path: Path) -> None:
    """They are not sent by mistake, and may be left out where that is meant."""
    written(tmp_path, PLAIN | {"model-00001-of-00002.safetensors": b"x"})

    with pytest.raises(UsageError, match="holds weights, and a bundle has none"):
        Bundle.of_directory(tmp_path)
    assert Bundle.of_directory(tmp_path, leaves_weights=True).files == PLAIN


@pytest.mark.parametrize("target", ["config.json", "/etc", "nowhere"])
def test_a_link_in_a_directory_is_refused(tmp_path: Path, target: str) -> None:
    """What it leads to could be anything, and changes without a trace."""
    written(tmp_path, PLAIN)
    (tmp_path / "link.json").symlink_to(target)

    with pytest.raises(UsageError, match=r"link\.json is a link or no plain file"):
        Bundle.of_directory(tmp_path)


def test_no_directory_is_no_bundle(tmp_path: Path) -> None:
    """A file is not taken for one."""
    with pytest.raises(UsageError, match="is no directory"):
        Bundle.of_directory(written(tmp_path, PLAIN) / "config.json")


def test_a_plain_configuration_is_not_code() -> None:
    """Neither are tokenizers, templates and licences."""
    files = {name: b"x" for name in ("LICENSE", "merges.txt", "tokenizer.model")}

    assert a_bundle(PLAIN | files | {"chat_template.jinja": b"x"}).code == []


@pytest.mark.parametrize(
    "config",
    [
        {"_name_or_path": "someone/model", "conv_kernel_size": 4, "pad": "</s>"},
        {"attn_implementation": {"": "sdpa", "text_config": "eager"}},
        {"_attn_implementation": None, "use_kernels": False},
    ],
)
def test_plain_values_of_a_configuration_need_no_consent(config: object) -> None:
    """Names of its origin, sizes, and what transformers has itself."""
    assert a_bundle({"config.json": json.dumps(config).encode()}).code == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.py", b""),
        ("lib.so", b""),
        ("run", b""),
        ("config.json", b'{"auto_map": {"AutoModel": "model.M"}}'),
        ("config.json", b'{"text_config": {"auto_map": {"AutoModel": "model.M"}}}'),
        ("tokenizer_config.json", b'{"auto_map": ["t.T", null]}'),
        ("config.json", b'{"attn_implementation": "someone/kernel"}'),
    ],
)
def test_what_runs_is_code(name: str, content: bytes) -> None:
    """So is a configuration that has others' code fetched or loaded."""
    assert a_bundle({name: content}).code == [name]


def test_code_of_another_repository_is_refused(tmp_path: Path) -> None:
    """No digest of ours would cover it."""
    said = json.dumps({"auto_map": {"AutoModel": "someone/repo--model.M"}}).encode()

    with pytest.raises(UsageError, match="code of another repository"):
        Bundle.of_directory(written(tmp_path, {"config.json": said}))


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        (b"factory = 7", "is not MODULE:FUNCTION"),
        (b'factory = "os.system"', "is not MODULE:FUNCTION"),
        (b'factory = "nowhere:make"', "there is no nowhere.py"),
        (b'maker = "model:make_model"', "has 'maker', and knows only 'factory'"),
        (b"factory =", "cannot be read"),
    ],
)
def test_a_manifest_that_cannot_be_followed_is_refused(
    tmp_path: Path, manifest: bytes, why: str
) -> None:
    """Whoever begins the run learns of it, and not its islands."""
    with pytest.raises(UsageError, match=why):
        Bundle.of_directory(written(tmp_path, WITH_CODE | {"bundle.toml": manifest}))


def test_a_factory_is_loaded_beside_everything_else(tmp_path: Path) -> None:
    """Its modules meet each other, and nobody else: nothing is on the path."""
    files = {
        "bundle.toml": b'factory = "json:make"',
        "json.py": b"from .layers import SIZE\ndef make(): return SIZE\n",
        "layers.py": b"SIZE = 4\n",
    }
    bundle = Bundle.of_directory(written(tmp_path, files))
    path = list(sys.path)

    assert bundle.factory is not None
    assert load_factory(tmp_path, bundle.digest, bundle.factory)() == 4
    assert sys.path == path
    assert "layers" not in sys.modules
    assert json.loads("4") == 4


def test_a_factory_that_is_not_there_is_named(tmp_path: Path) -> None:
    """So is a module that it needs."""
    written(tmp_path, {"empty.py": b"", "needs.py": b"import nowhere_at_all\n"})

    with pytest.raises(UsageError, match="has no function 'make'"):
        load_factory(tmp_path, "a" * 64, "empty:make")
    with pytest.raises(UsageError, match="nowhere_at_all"):
        load_factory(tmp_path, "a" * 64, "needs:make")


def test_an_edited_file_is_another_model() -> None:
    """The digest is part of the run's fingerprint and of its model's."""
    one, other = a_bundle(), a_bundle(PLAIN | {"config.json": b"{}"})
    mine, theirs = (defined_by(each, RunSettings()) for each in (one, other))

    assert mine.fingerprint != theirs.fingerprint != RunSettings().fingerprint
    prints = {
        model_fingerprint(MODEL, bundle=each.run.bundle)
        for each in (mine, theirs, RunSettings())
    }
    assert len(prints) == 3


def test_a_run_file_may_name_its_bundle() -> None:
    """Then no other is taken, and what is no digest is refused."""
    bundle = a_bundle()
    named = RunSettings.from_dict({"run": {"bundle": bundle.digest}})

    assert defined_by(bundle, named) == named
    with pytest.raises(UsageError, match="Give the directory of the other"):
        defined_by(a_bundle(WITH_CODE), named)
    with pytest.raises(SettingsError, match="64 hexadecimal digits"):
        RunSettings.from_dict({"run": {"bundle": "latest"}})
