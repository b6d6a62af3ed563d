"""The settings and the model of a run for torchft.

torchft decides when to sync, takes the outer step itself and mixes the result into its
weights. A run whose settings contradict that would be silently ignored, so it is
refused. The model of the run has one fragment per module, and one for parcels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from atoll.errors import SettingsError, UsageError
from atoll.protocol import ModelSpec, TensorSpec
from atoll.settings import RunSettings
from atoll.weights import FragmentLayout, lay_out

PARCEL = "parcel"
"""The tensor that carries states between islands; see `state_transfer.split`."""

SMALLEST_PARCEL, LARGEST_PARCEL = 2**14, 2**24
"""In elements. A parcel of a large model is as large as its largest fragment."""


def run_settings(num_fragments: int = 1, *, wire: str = "fp32") -> RunSettings:
    """Return settings of a run for torchft; `with_values` changes the others.

    Args:
        num_fragments: number of modules in the list for `DiLoCo`; 1 for `LocalSGD`.
        wire: the codec for `should_quantize`; "fp32" does not quantize.
    """
    return RunSettings.from_dict(
        {
            "sync": {"num_fragments": num_fragments},
            "wire": {"up": wire, "down": "bf16" if wire in _COARSE else wire},
            "outer": {"optimizer": "sgd", "lr": 1.0},
        }
    )


_COARSE = ("bf16-stochastic", "e3m0", "topk-2bit")
"""Codecs of `wire.up` that `wire.down` refuses, or should not use."""


def require_settings(settings: RunSettings, *, num_fragments: int) -> None:
    """Return if no setting contradicts torchft.

    Raises:
        SettingsError: one does. The message has the first one and its required value.
    """
    sync, outer = settings.sync, settings.outer
    order = "strided" if sync.fragment_order == "by_size" else sync.fragment_order
    needed: list[tuple[str, object, object, str]] = [
        (
            "sync.num_fragments",
            sync.num_fragments,
            num_fragments,
            f"the modules in `reduces` are {num_fragments}",
        ),
        ("sync.mode", sync.mode, "sync", "torchft waits for all islands"),
        ("sync.fragment_order", sync.fragment_order, order, "the modules say it"),
        ("sync.rest", sync.rest, "balanced", "the modules are the fragments"),
        ("sync.overlap_steps", sync.overlap_steps, 0, "fragment_sync_delay says it"),
        ("sync.adopt", sync.adopt, "rebase", "fragment_update_alpha says it"),
        (
            "sync.dynamic_local_updates",
            sync.dynamic_local_updates,
            False,
            "sync_every of DiLoCo says it",
        ),
        ("outer.optimizer", outer.optimizer, "sgd", "torchft takes the outer step"),
        ("outer.lr", outer.lr, 1.0, "torchft takes the outer step"),
        ("outer.weight", outer.weight, "uniform", "torchft reports no tokens"),
        ("data.order", settings.data.order, "islands", "torchft reads its own data"),
        ("run.end_tokens", settings.run.end_tokens, None, "torchft reports no tokens"),
    ]
    for key, value, must, because in needed:
        if value != must:
            raise SettingsError(
                f"{key}={value!r} would have no effect: {because}. For torchft it must "
                f"be {must!r}; atoll.integrations.torchft.run_settings makes such a "
                "run."
            )


def require_codec(settings: RunSettings, *, should_quantize: bool) -> None:
    """Return if the run's codecs quantize exactly when `should_quantize` is set.

    Raises:
        UsageError: they do not. The message has both.
    """
    wire = settings.wire
    is_exact = (wire.up, wire.mean_codec) == ("fp32", "fp32")
    if should_quantize and is_exact:
        raise UsageError(
            "should_quantize=True, and the run's wire.up='fp32' and "
            f"wire.down={wire.down!r} do not quantize. Set "
            "wire.up to 'int8', 'bf16' or 'e3m0' in the run, or do not quantize."
        )
    if not should_quantize and not is_exact:
        raise UsageError(
            f"should_quantize=False, and the run's wire.up={wire.up!r} and wire.down="
            f"{wire.down!r} quantize. Set both to 'fp32' in the run, or pass "
            "should_quantize=True."
        )


def spec_of(modules: Sequence[torch.nn.Module]) -> ModelSpec:
    """Return the model of a run that reduces these modules, one after the other.

    Raises:
        UsageError: there is nothing to reduce, or a parameter is sharded.
    """
    tensors = [
        _tensor_spec(f"fragments.{number}.{name}", parameter)
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    ]
    sizes = [sum(p.numel() for p in module.parameters()) for module in modules]
    if not sizes or 0 in sizes:
        raise UsageError(
            f"reduces={list(modules)!r} must be modules with parameters. Pass the list "
            "that DiLoCo gets, or [model] for LocalSGD."
        )
    elements = min(max(*sizes, SMALLEST_PARCEL), LARGEST_PARCEL)
    parcel = TensorSpec(name=PARCEL, shape=(elements,), dtype="float32", role="buffer")
    return ModelSpec((*tensors, parcel))


def layout_of(
    model: ModelSpec, settings: RunSettings
) -> tuple[tuple[FragmentLayout, ...], FragmentLayout]:
    """Return the fragments in the order of the modules, and that of the parcels."""
    *fragments, parcel = lay_out(model, settings)
    assert parcel.is_buffers
    for number, fragment in enumerate(fragments):
        prefix = f"fragments.{number}."
        assert all(tensor.name.startswith(prefix) for tensor in fragment.tensors)
    return tuple(fragments), parcel


def _tensor_spec(name: str, parameter: torch.Tensor) -> TensorSpec:
    if isinstance(parameter, DTensor):
        raise UsageError(
            f"{name!r} is sharded over the processes of an island, and this "
            "integration is for islands of one process. Use atoll.torch.join."
        )
    return TensorSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        role="parameter",
    )
