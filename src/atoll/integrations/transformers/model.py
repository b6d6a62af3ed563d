"""A `config.json` and tokenizer files as a model and a tokenizer, without the hub."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.island.model_definition import definition_of, require_consent

FALLBACK = "AutoModelForCausalLM"
"""Makes the model of a configuration without `architectures`."""


def make_model(directory: Path, *, trust_remote_code: bool = False) -> torch.nn.Module:
    """Return the model that a directory's `config.json` describes, newly initialised.

    It has the dtype of the configuration, or float32. Code in the directory is
    loaded only with `trust_remote_code`; the hub is not contacted.

    Raises:
        UsageError: this version of transformers does not know such a model, or the
            configuration cannot be read.
    """
    config = _read(
        lambda: transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        ),
        directory,
    )
    auto_class = _auto_class(config) if trust_remote_code else None
    if auto_class is None and config.architectures:
        with _made_as(config.dtype):
            return _architecture(config.architectures[0])(config)
    auto = getattr(transformers, auto_class or FALLBACK)
    model: torch.nn.Module = _read(
        lambda: auto.from_config(config, trust_remote_code=trust_remote_code), directory
    )
    return model


def tokenizer_from_run(
    run: MemoryRun | str | None = None,
) -> transformers.PreTrainedTokenizerBase:
    """Return the run's tokenizer, from the files in its bundle.

    Raises:
        UsageError: the run has no bundle or no tokenizer in it, or its code may not run
            on this machine.
    """
    definition = definition_of(run)
    require_consent(definition)
    tokenizer: transformers.PreTrainedTokenizerBase = _read(
        lambda: transformers.AutoTokenizer.from_pretrained(
            definition.directory,
            local_files_only=True,
            trust_remote_code=bool(definition.bundle.code),
        ),
        definition.directory,
    )
    return tokenizer


def saved_names(
    directory: Path, names: Collection[str], *, trust_remote_code: bool = False
) -> dict[str, str]:
    """Return, for each tensor of a run, its name in a saved model.

    A tied tensor is in a run once, by its first name, and in a saved model once, by
    the name of the tensor that the others are tied to. No memory is allocated.

    Raises:
        UsageError: a tensor of the model is not in the run, or the other way round.
    """
    with torch.device("meta"):
        model = make_model(directory, trust_remote_code=trust_remote_code)
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    saved: dict[str, str] = {}
    for group in groups.values():
        run_names = [name for name in group if name in names]
        if not run_names:
            raise UsageError(
                f"{group[0]!r} of the model is not among the run's weights. A frozen "
                "parameter or an integer buffer is a constant: give it with the model."
            )
        saved[run_names[0]] = _source_of(model, group)
    beyond = sorted(set(names) - saved.keys())
    if beyond:
        raise UsageError(
            f"{beyond[0]!r} of the run is not a tensor of the model that config.json "
            "describes. Give the configuration of the run's model."
        )
    return saved


def _source_of(model: torch.nn.Module, group: list[str]) -> str:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in group if name not in tied), group[0])


def _architecture(name: str) -> type[torch.nn.Module]:
    model_class = getattr(transformers, name, None)
    if isinstance(model_class, type) and issubclass(
        model_class, transformers.PreTrainedModel
    ):
        return model_class
    raise UsageError(
        f"architectures=[{name!r}] in config.json is no model of transformers "
        f"{transformers.__version__}. Install a version that has it, or put its code "
        "into the bundle, with auto_map."
    )


@contextmanager
def _made_as(dtype: object) -> Iterator[None]:
    """Make parameters of a dtype; a model's explicit float32 tensors stay float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _auto_class(config: Any) -> str | None:
    """Return the class that loads a model whose code is in the bundle."""
    mapped = getattr(config, "auto_map", None) or {}
    models = sorted(name for name in mapped if name.startswith("AutoModel"))
    return next((name for name in models if name == FALLBACK), next(iter(models), None))


def _read(read: Any, directory: Path) -> Any:
    try:
        return read()
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise UsageError(
            f"transformers {transformers.__version__} cannot make it from {directory}: "
            f"{exc}"
        ) from exc
