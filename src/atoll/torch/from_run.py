"""A model with a definition and weights that both come from the run.

Among several ranks, the first one decides for all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from atoll.bundle.definition import CONFIG
from atoll.bundle.directory import load_factory
from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.island.model_definition import (
    ModelDefinition,
    definition_of,
    needs_consent,
    require_consent,
)
from atoll.torch.build import Source, build

Prepare = Callable[[torch.nn.Module], torch.nn.Module]

TRANSFORMERS = "atoll.integrations.transformers"
"""Makes models from a config.json; imported by name when a bundle has one."""

_built: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()


def from_run(
    run: MemoryRun | str | None = None,
    *,
    device: str | torch.device = "cpu",
    prepare: Prepare | None = None,
    source: Source | None = None,
    checkpoint: str | Path | None = None,
    initialise: Callable[[torch.nn.Module], object] | None = None,
) -> torch.nn.Module:
    """Return the run's model, built from its bundle and filled with its weights.

    It is constructed on the meta device and filled as by `build`. A run without weights
    gets them from the first island that joins: then the model is initialised, with the
    same values in every process. `join` refuses it in a run with another bundle.

    Args:
        run: as for `join`.
        device: the device of the model.
        prepare: called with the model before it is filled, and returns the model to
            train: to freeze parameters, or to shard them by `fully_shard`.
        source: as for `build`, for tensors that the run does not have.
        checkpoint: as for `build`.
        initialise: as for `build`.

    Raises:
        UsageError: the run has no bundle, its code may not run here, or `build` raised
            it.
        ModelError: a tensor has another shape in the run.
    """
    definition = definition_of(run)
    is_founded = decided(lambda: _ready(definition))
    make = maker(definition)

    def make_prepared() -> torch.nn.Module:
        model = make()
        _built[model] = definition.bundle.digest
        return model if prepare is None else prepare(model)

    if not is_founded and checkpoint is None:
        return _initialised(make, definition.bundle.digest, device, prepare)
    return build(
        make_prepared,
        run,
        device=device,
        source=source,
        checkpoint=checkpoint,
        initialise=initialise,
    )


def _ready(definition: ModelDefinition) -> bool:
    """Return whether the run has weights, once its code may run here.

    One rank decides for all: the run may be founded between two checks.
    """
    if needs_consent(definition.bundle):
        require_consent(definition)
    return definition.is_founded


def bundle_of(modules: list[torch.nn.Module]) -> str:
    """Return the digest of the bundle that built the modules; empty if none did."""
    parts = (part for module in modules for part in module.modules())
    return next((_built[part] for part in parts if part in _built), "")


def maker(definition: ModelDefinition) -> Callable[[], torch.nn.Module]:
    """Return the function that constructs a bundle's model. Its code may run.

    Raises:
        UsageError: the bundle names none, or a library that it needs is missing.
    """
    bundle, directory = definition.bundle, definition.directory
    if bundle.factory is not None:
        return load_factory(directory, bundle.digest, bundle.factory)
    if CONFIG in bundle.files:
        face = _transformers()
        return lambda: face(directory, trust_remote_code=bool(bundle.code))
    raise UsageError(
        "The run's bundle does not say how its model is made. It needs a config.json "
        "of transformers, or a bundle.toml with factory = 'MODULE:FUNCTION'."
    )


def _transformers() -> Callable[..., torch.nn.Module]:
    try:
        make_model: Callable[..., torch.nn.Module] = importlib.import_module(
            TRANSFORMERS
        ).make_model
    except ModuleNotFoundError as exc:
        if exc.name != "transformers":
            raise
        raise UsageError(
            "The run's model is defined for transformers, which is not installed. "
            'Install it: pip install "atoll[transformers]".'
        ) from exc
    return make_model


def _initialised(
    make: Callable[[], torch.nn.Module],
    digest: str,
    device: str | torch.device,
    prepare: Prepare | None,
) -> torch.nn.Module:
    """Return a model with initial weights: the same ones for the same bundle."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(digest[:15], 16))
        model = make()
    model = model.to(device)
    _built[model] = digest
    return model if prepare is None else prepare(model)


CONSENT_TIMEOUT = timedelta(minutes=30)
"""Longest wait for the first rank, whose user may read the code before consenting."""


def decided(decide: Callable[[], bool]) -> bool:
    """Return the first rank's decision; all ranks call this.

    Before torch.distributed is entered, every process decides for itself.

    Raises:
        AtollError: the error of `decide`, the same on every rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return decide()
    from atoll.torch.ranks.channel import (
        LEADER,
        from_message,
        open_channels,
        to_message,
    )

    (channel,) = open_channels(range(dist.get_world_size()), CONSENT_TIMEOUT, 1)
    if not channel.is_leader:
        message = channel.receive_message(LEADER)
        if "answer" not in message:
            raise from_message(message)
        return bool(message["answer"])
    try:
        answer = decide()
    except BaseException as exc:  # or the others would wait forever
        channel.send_to_all(to_message(exc, LEADER))
        raise
    channel.send_to_all({"answer": answer})
    return answer
