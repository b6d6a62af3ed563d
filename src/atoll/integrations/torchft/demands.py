"""What a run must be, so that everything torchft is asked for is what happens.

torchft decides when to sync, takes the outer step itself and mixes what it gets; a run
that asks for another way of doing these would be silently ignored, so it is refused.
"""

from __future__ import annotations

from atoll.errors import SettingsError, UsageError
from atoll.settings import RunSettings


def run_settings(num_fragments: int = 1, *, wire: str = "fp32") -> RunSettings:
    """Return settings of a run for torchft; `with_values` changes the others.

    Args:
        num_fragments: how many modules `DiLoCo` is given; 1 for `LocalSGD`.
        wire: the codec of `should_quantize`; "fp32" is for who does not quantize.
    """
    return RunSettings.from_dict(
        {
            "sync": {"num_fragments": num_fragments},
            "wire": {"up": wire, "down": "bf16" if wire in _COARSE else wire},
            "outer": {"optimizer": "sgd", "lr": 1.0},
        }
    )


_COARSE = ("bf16-stochastic", "e3m0", "topk-2bit")
"""Codecs of the way up that the way down refuses, or should not have."""


def require_settings(settings: RunSettings, *, num_fragments: int) -> None:
    """Return when nothing in the settings contradicts what torchft does.

    Raises:
        SettingsError: naming the first one that does, and what it must be.
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
        ("sync.fragment_order", sync.fragment_order, order, "the modules say it"),
        ("sync.rest", sync.rest, "balanced", "the modules say what belongs together"),
        ("sync.overlap_steps", sync.overlap_steps, 0, "fragment_sync_delay says it"),
        ("sync.adopt", sync.adopt, "rebase", "fragment_update_alpha says it"),
        ("outer.optimizer", outer.optimizer, "sgd", "torchft takes the outer step"),
        ("outer.lr", outer.lr, 1.0, "torchft takes the outer step"),
        ("outer.weight", outer.weight, "uniform", "torchft reports no tokens"),
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
    """Return when the run's wire is as lossy as torchft was asked to be.

    Raises:
        UsageError: it is not, naming both.
    """
    wire = settings.wire
    is_exact = (wire.up, wire.down) == ("fp32", "fp32")
    if should_quantize and is_exact:
        raise UsageError(
            "should_quantize=True, and the run's wire.up and wire.down are 'fp32'. Set "
            "wire.up to 'int8', 'bf16' or 'e3m0' in the run, or do not quantize."
        )
    if not should_quantize and not is_exact:
        raise UsageError(
            f"should_quantize=False, and the run's wire.up={wire.up!r} and wire.down="
            f"{wire.down!r} quantize. Set both to 'fp32' in the run, or pass "
            "should_quantize=True."
        )
