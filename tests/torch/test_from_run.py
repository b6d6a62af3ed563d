"""A model that comes from the run: definition, weights, and whose code may run."""

from __future__ import annotations

import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import atoll.torch
from atoll import RunSettings
from atoll.bundle import Bundle
from atoll.errors import ModelError, UsageError
from atoll.exchange import MemoryRun
from atoll.island import model_definition as consent
from atoll.island.environment import definitions_from_environment
from atoll.island.model_definition import ModelDefinition, definition_of
from tests.bundle.samples import PLAIN, WITH_CODE, a_bundle, tiny_config
from tests.cli.runs import as_user
from tests.torch.processes import Group, run_groups
from tests.torch.rank_decisions import decide

pytestmark = pytest.mark.torch

SETTINGS = RunSettings.from_dict({"sync": {"sync_every": 2}})


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, tmp_path / "home", XDG_CACHE_HOME=str(tmp_path / "cache"))


def run_of(files: Mapping[str, bytes]) -> MemoryRun:
    return MemoryRun(SETTINGS, bundle=a_bundle(files))


def trusting(patch: pytest.MonkeyPatch, run: MemoryRun) -> MemoryRun:
    assert run.bundle is not None
    patch.setenv("ATOLL_TRUST_CODE", run.bundle.digest)
    return run


def joined(model: torch.nn.Module, run: MemoryRun) -> atoll.torch.Island:
    return atoll.torch.join(model, torch.optim.SGD(model.parameters(), lr=0.1), run)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_configuration_is_a_model_with_the_runs_weights(kind: str) -> None:
    """The second island builds what the first has trained, tied and rotary and all."""
    run = run_of(tiny_config(kind, tie_word_embeddings=True))
    first = atoll.torch.from_run(run)
    tokens = torch.arange(8)[None]
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    with atoll.torch.join(first, optimizer, run) as island:
        for _ in range(2):
            first(tokens, labels=tokens).loss.backward()
            optimizer.step()
        assert island.round == 1
        anchor = island.anchor()
        second = atoll.torch.from_run(run)

    found = weights(second)
    assert all(torch.equal(found[name], value) for name, value in anchor.items())
    first.load_state_dict(found)
    assert torch.equal(first.eval()(tokens).logits, second.eval()(tokens).logits)


def test_a_dtype_is_of_parameters_only() -> None:
    """What a model computes in float32 stays so, as from_pretrained has it."""
    model = atoll.torch.from_run(run_of(tiny_config("llama", dtype="bfloat16")))

    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert dict(model.named_buffers())["model.rotary_emb.inv_freq"].dtype == (
        torch.float32
    )


def test_first_weights_are_the_same_wherever_they_are_made() -> None:
    """And nobody else's random numbers are touched."""
    run = run_of(tiny_config())
    torch.manual_seed(1)
    one, drawn = weights(atoll.torch.from_run(run)), torch.rand(1)
    torch.manual_seed(1)
    same = torch.rand(1)
    torch.manual_seed(2)
    other = weights(atoll.torch.from_run(run))

    assert torch.equal(drawn, same)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_factory_makes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its code may run, by its digest."""
    run = trusting(monkeypatch, run_of(WITH_CODE))
    model = atoll.torch.from_run(run)
    with joined(model, run):
        again = atoll.torch.from_run(run)

    assert [tuple(each.shape) for each in again.parameters()] == [(4, 4), (4,)]


def test_code_does_not_run_without_consent() -> None:
    """Where nobody can be asked it is refused, and the flag to pass is said."""
    run = run_of(WITH_CODE | {"model.py": b"raise SystemExit('it ran')"})
    assert run.bundle is not None

    with pytest.raises(UsageError, match=f"--trust-code {run.bundle.digest}") as met:
        atoll.torch.from_run(run)
    assert "layers.py, model.py" in str(met.value)


def test_consent_is_to_one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle of which a file was edited is not covered by it."""
    trusting(monkeypatch, run_of(WITH_CODE))
    edited = run_of(WITH_CODE | {"layers.py": b"SIZE = 5\n"})

    with pytest.raises(UsageError, match="The run's bundle has code"):
        atoll.torch.from_run(edited)


def test_a_plain_configuration_needs_no_consent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even where another bundle's was refused."""
    monkeypatch.setenv("ATOLL_TRUST_CODE", "none")

    assert atoll.torch.from_run(run_of(tiny_config())) is not None


def asked_of(patch: pytest.MonkeyPatch, answer: str) -> list[str]:
    """Let a person be at the terminal who says the same to every question."""
    questions: list[str] = []

    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return answer + "\n"

        def write(self, text: str) -> int:
            questions.append(text)
            return len(text)

        def flush(self) -> None:
            pass

    patch.setattr(sys, "stdin", Terminal())
    patch.setattr(sys, "stderr", Terminal())
    return questions


def definition(files: Mapping[str, bytes] = WITH_CODE) -> ModelDefinition:
    return definition_of(run_of(files))


def test_consent_is_asked_once_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file of this user's own; a changed bundle is asked for again."""
    questions = asked_of(monkeypatch, "y")
    for _ in range(2):
        consent.require_consent(definition())

    digest = a_bundle(WITH_CODE).digest
    kept = definitions_from_environment().trusted / digest
    assert len(questions) == 1
    assert digest in questions[0]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    consent.require_consent(definition(WITH_CODE | {"layers.py": b"SIZE = 5\n"}))
    assert len(questions) == 2


def test_a_no_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered, and the command ends."""
    asked_of(monkeypatch, "")

    with pytest.raises(UsageError, match="ATOLL_TRUST_CODE="):
        consent.require_consent(definition())
    assert not definitions_from_environment().trusted.exists()


def test_only_the_first_rank_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of them would all read the same terminal."""
    questions = asked_of(monkeypatch, "y")
    monkeypatch.setenv("RANK", "1")

    with pytest.raises(UsageError, match="--trust-code"):
        consent.require_consent(definition())
    assert questions == []


def test_a_model_of_another_bundle_is_refused_at_joining() -> None:
    """By both digests, before its first step: an edited file is another model."""
    run = run_of(tiny_config())
    edited = run_of(tiny_config(resid_pdrop=0.5))  # the same tensors
    with joined(atoll.torch.from_run(edited), edited), pytest.raises(ModelError) as met:
        joined(atoll.torch.from_run(run), edited)

    assert run.bundle is not None
    assert edited.bundle is not None
    assert run.bundle.digest[:12] in str(met.value)
    assert edited.bundle.digest[:12] in str(met.value)


def test_a_model_of_a_bundle_is_refused_where_there_is_none() -> None:
    """A run without a bundle has another model's definition, if any."""
    with pytest.raises(ModelError, match="the run has no bundle"):
        joined(atoll.torch.from_run(run_of(tiny_config())), MemoryRun(SETTINGS))


def test_a_wrapped_model_is_still_of_its_bundle() -> None:
    """What prepares a model may put it into another."""
    run = run_of(tiny_config())
    wrapped = atoll.torch.from_run(run, prepare=torch.nn.Sequential)

    with pytest.raises(ModelError, match="another model"):
        joined(wrapped, run_of(tiny_config(resid_pdrop=0.5)))


def test_an_island_that_brings_its_model_is_judged_by_its_tensors() -> None:
    """Another framework, or a loop of somebody's own, may take part."""
    run = run_of(tiny_config())
    with joined(atoll.torch.from_run(run), run):
        own = atoll.torch.from_run(run_of(tiny_config()))
        plain = torch.nn.ModuleDict(dict(own.named_children()))
        joined(plain, run).leave()


def test_a_model_is_prepared_while_it_is_empty() -> None:
    """Frozen parameters come from a source, as with build."""
    run = run_of(tiny_config())

    def prepare(model: torch.nn.Module) -> torch.nn.Module:
        model.get_submodule("transformer.wpe").requires_grad_(False)
        return model

    with joined(atoll.torch.from_run(run, prepare=prepare), run):
        positions = torch.ones(16, 8)
        given = {"transformer.wpe.weight": positions}.get
        model = atoll.torch.from_run(run, prepare=prepare, source=given)

    assert torch.equal(model.get_parameter("transformer.wpe.weight"), positions)


def test_a_run_without_a_bundle_says_so() -> None:
    """And what to do instead."""
    with pytest.raises(UsageError, match=r"no bundle.*atoll\.torch\.build"):
        atoll.torch.from_run(MemoryRun(SETTINGS))
    with pytest.raises(UsageError, match="run='none' has no bundle"):
        atoll.torch.from_run("none")


def test_a_bundle_that_makes_no_model_says_so() -> None:
    """A tokenizer alone is a bundle, and no model."""
    with pytest.raises(UsageError, match="does not say how its model is made"):
        atoll.torch.from_run(run_of({"tokenizer.json": b"{}"}))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"{", "cannot make it"),
        (b'{"model_type": "no-such-model"}', "cannot make it"),
        (b'{"model_type": "gpt2", "architectures": ["pipeline"]}', "no model of trans"),
    ],
)
def test_a_configuration_that_is_none_is_named(config: bytes, why: str) -> None:
    """By what transformers has to say of it."""
    with pytest.raises(UsageError, match=why):
        atoll.torch.from_run(run_of(PLAIN | {"config.json": config}))


def test_an_edited_stage_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consent was to what came from the run, not to what somebody put there."""
    run = trusting(monkeypatch, run_of(WITH_CODE | {"x.txt": b"another digest"}))
    directory = definition_of(run).directory
    (directory / "model.py").write_text("raise SystemExit('it ran')")

    assert atoll.torch.from_run(run) is not None
    assert run.bundle is not None
    assert Bundle.of_directory(directory).digest == run.bundle.digest


def test_the_first_rank_decides_for_all() -> None:
    """It alone is asked, and what it says is said on every rank."""
    allowed, refused = run_groups(
        Group(decide, (False,), ranks=2), Group(decide, (True,), ranks=2)
    )

    assert allowed == [([0], "yes"), ([], "yes")]
    assert refused == [([0], "Nobody consents."), ([], "Nobody consents.")]
