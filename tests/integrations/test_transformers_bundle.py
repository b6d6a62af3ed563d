"""What `transformers` makes of a run's bundle, and loads of a run that is exported."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll.torch
from atoll import RunSettings
from atoll.bundle import Bundle
from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from tests.bundle.samples import a_bundle, tiny_config, written
from tests.cli.runs import as_user, run

pytestmark = pytest.mark.torch

Said = pytest.CaptureFixture[str]
TOKENS = torch.arange(8)[None]
CUSTOM = {
    "config.json": json.dumps(
        {
            "model_type": "reef",
            "size": 4,
            "architectures": ["Reef"],
            "auto_map": {"AutoConfig": "reef.ReefConfig", "AutoModel": "reef.Reef"},
        }
    ).encode(),
    "reef.py": b"""
import torch
from transformers import PreTrainedConfig, PreTrainedModel

class ReefConfig(PreTrainedConfig):
    model_type = "reef"

class Reef(PreTrainedModel):
    config_class = ReefConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(config.size, config.size)
        self.post_init()

    def forward(self, values):
        return self.layer(values)
""",
}


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, tmp_path / "home", XDG_CACHE_HOME=str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the files of a tokenizer that knows four words."""
    import tokenizers
    import transformers

    words = {"reef": 0, "lagoon": 1, "tide": 2, "?": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    kind: Any = transformers.PreTrainedTokenizerFast
    made = kind(tokenizer_object=inner, unk_token="?")
    made.save_pretrained(directory)
    return dict(Bundle.of_directory(directory).files)


def test_a_tokenizer_comes_from_the_run(tmp_path: Path) -> None:
    """Of the bundle's files, without a local copy of any."""
    from atoll.integrations.transformers import tokenizer_from_run

    files = tokenizer_files(tmp_path / "made")
    tokenizer = tokenizer_from_run(MemoryRun(bundle=a_bundle(files | tiny_config())))

    assert tokenizer("tide reef sand")["input_ids"] == [2, 0, 3]


def test_a_tokenizer_that_is_not_there_is_named() -> None:
    """By what transformers says of it."""
    from atoll.integrations.transformers import tokenizer_from_run

    with pytest.raises(UsageError, match="cannot make it"):
        tokenizer_from_run(MemoryRun(bundle=a_bundle({"notes.md": b"none"})))


def test_a_model_of_its_own_code_is_made_with_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By auto_map, from the bundle alone."""
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    run = MemoryRun(bundle=a_bundle(CUSTOM))
    with pytest.raises(UsageError, match=r"config\.json, reef\.py"):
        atoll.torch.from_run(run)
    assert run.bundle is not None
    monkeypatch.setenv("ATOLL_TRUST_CODE", run.bundle.digest)
    model = atoll.torch.from_run(run)

    assert type(model).__name__ == "Reef"
    assert model(torch.zeros(1, 4)).shape == (1, 4)


@pytest.fixture
def trained(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a run in a directory that an island has trained."""
    kind, has_bundle = request.param
    settings = RunSettings.from_dict(
        {"run": {"end_rounds": 1}, "sync": {"sync_every": 1}}
    )
    files = written(tmp_path / "model", tiny_config(kind, tie_word_embeddings=True))
    written(files, tokenizer_files(tmp_path / "made"))
    place = tmp_path / "bucket"
    if has_bundle:
        atoll.init(str(place), settings, bundle=files)
        model = atoll.torch.from_run(str(place))
    else:
        atoll.init(str(place), settings)
        local = MemoryRun(bundle=Bundle.of_directory(files))
        model = deepcopy(atoll.torch.from_run(local))  # which no bundle is known of
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.torch.join(model, optimizer, str(place)):
        while True:
            model(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
    return place


@pytest.mark.parametrize("trained", [("gpt2", True), ("llama", True)], indirect=True)
def test_an_exported_run_is_loaded_by_from_pretrained(
    trained: Path, tmp_path: Path, capsys: Said
) -> None:
    """Every weight is the run's, tied ones are tied, and the tokenizer is beside."""
    import transformers

    out = tmp_path / "out"
    code, said, err = run(capsys, "export", trained, out, "--format", "hf", "--json")
    assert code == 0, err
    found: Any = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    loaded, info = found
    built = atoll.torch.from_run(str(trained)).eval()

    assert not any(info[key] for key in ("missing_keys", "unexpected_keys"))
    assert torch.equal(loaded.eval()(TOKENS).logits, built(TOKENS).logits)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("tide")["input_ids"] == [2]
    assert json.loads(said)["round"] == 1
    assert [each.name for each in tmp_path.glob("out*")] == ["out"]


@pytest.mark.parametrize("trained", [("gpt2", False)], indirect=True)
def test_a_run_without_a_bundle_is_exported_with_a_directory(
    trained: Path, tmp_path: Path, capsys: Said
) -> None:
    """Without one it says what to pass; a wrong one is named, and nothing is left."""
    export = ("export", trained, tmp_path / "out", "--format", "hf")
    code, _, err = run(capsys, *export)
    assert (code, "--bundle DIR" in err) == (2, True)
    other = written(tmp_path / "other", tiny_config(n_layer=2))
    code, _, err = run(capsys, *export, "--bundle", other)
    assert (code, "is not among the run's weights" in err) == (2, True)
    none = written(tmp_path / "none", {"notes.md": b"x"})
    code, _, err = run(capsys, *export, "--bundle", none)
    assert (code, "has no config.json" in err) == (2, True)
    assert list(tmp_path.glob("out*")) == []

    (tmp_path / "model" / "model.safetensors").write_bytes(b"not looked at")
    assert run(capsys, *export, "--bundle", tmp_path / "model")[0] == 0
    again = run(capsys, *export, "--bundle", tmp_path / "model")
    assert (again[0], "exists already" in again[2]) == (2, True)


def test_a_bundle_is_only_for_this_format(tmp_path: Path, capsys: Said) -> None:
    """A plain file of weights needs none."""
    atoll.init(str(tmp_path / "bucket"), RunSettings())
    where = (tmp_path / "bucket", tmp_path / "out")
    code, _, err = run(capsys, "export", *where, "--bundle", tmp_path)

    assert (code, "--format hf" in err) == (2, True)
