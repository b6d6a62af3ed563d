"""The tables of a run file, one frozen dataclass each.

A section judges its own fields and their combinations when it is made, so that a
section that exists is valid. Rules between two sections are in `run_settings`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

from atoll.errors import AtollWarning, SettingsError
from atoll.fields import shortest_fp32, shown
from atoll.settings import rules

# A roster holds at most this many islands, and a fragment's number fits 16 bits with
# one to spare for the buffers' fragment.
MAX_ISLANDS = 65_536
DEFAULT_ISLANDS = 64
MAX_FRAGMENTS = 65_535
_MAX_STEPS = 2**31 - 1
_MAX_COUNT = 2**63 - 1

_BELOW_8_BITS = ("e3m0", "topk-2bit")
_UP = ("fp32", "bf16", "bf16-stochastic", "int8", "e3m0", "topk-2bit")
GATHER = "gather"
_DOWN = ("fp32", "bf16", "int8", "e3m0", GATHER)
_NO_MEMORY = (
    "outcomes have no error feedback for the values that a sparse codec omits. "
    "Choose 'bf16' or 'int8', or 'gather' to send the updates instead of their mean."
)

_COUNT = rules.integer(1, _MAX_COUNT)
_ISLANDS = rules.integer(1, MAX_ISLANDS)
_SHARE = rules.number(0.0, 1.0, is_fp32=True)
# As in algorithm.outer.
_OUTER_LR = rules.number(0.0, 2.0**20, is_low_open=True, is_fp32=True)
_MOMENTUM = rules.number(0.0, 1.0, is_high_open=True, is_fp32=True)
_POSITIVE = rules.number(0.0, is_low_open=True)
_MAX_GRACE_S = 86_400.0
MAX_UNIT_ROWS = 2**31
MAX_PASSES = 2**20


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """`[run]`: the run's name, who takes part, and when it ends."""

    name: str = rules.setting("run", rules.NAME)
    """The name of the run."""

    start_islands: int = rules.setting(1, _ISLANDS)
    """Islands that must have joined before the first round opens."""

    quorum: int = rules.setting(1, _ISLANDS)
    """Updates needed to close a round."""

    max_islands: int | None = rules.setting(None, rules.maybe(_ISLANDS))
    """Islands that may be live together. Not set: 64, or `start_islands` or `quorum`
    if one of them is more."""

    patience: float = rules.setting(3.0, _POSITIVE)
    """Spreads beyond its own median arrival after which an island is late."""

    end_rounds: int | None = rules.setting(None, rules.maybe(_COUNT))
    """The run ends when every fragment has committed this many rounds."""

    end_tokens: int | None = rules.setting(None, rules.maybe(_COUNT))
    """The run ends when this many tokens have counted."""

    decay_round: int | None = rules.setting(None, rules.maybe(_COUNT))
    """The round with whose first inner step `atoll.torch.WSD` begins to decay."""

    bundle: str | None = rules.setting(None, rules.maybe(rules.DIGEST))
    """The digest of the bundle that defines the model, as --bundle sets it."""

    def __post_init__(self) -> None:
        rules.check_fields(self, "run")
        if self.max_islands is None:
            return  # how data is cut then depends on start_islands alone
        for key in ("quorum", "start_islands"):
            if getattr(self, key) > self.max_islands:
                raise SettingsError(
                    f"run.{key}={getattr(self, key)} exceeds "
                    f"run.max_islands={self.max_islands}, so no round could close. "
                    f"Choose at most {self.max_islands}."
                )

    @property
    def most_islands(self) -> int:
        """Islands that may be live together, with the default if it is not set."""
        if self.max_islands is not None:
            return self.max_islands
        return max(DEFAULT_ISLANDS, self.start_islands, self.quorum)


@dataclass(frozen=True, kw_only=True)
class SyncSection:
    """`[sync]`: when fragments are sent, and how an island adopts an outcome."""

    mode: str = rules.setting("sync", rules.choice("sync", "async"))
    """Whether a round waits for its islands or takes who arrived."""

    sync_every: int = rules.setting(100, rules.integer(1, _MAX_STEPS))
    """Inner steps between two rounds of a fragment."""

    num_fragments: int = rules.setting(1, rules.integer(1, MAX_FRAGMENTS))
    """Parts of the model that synchronise one after the other."""

    fragment_order: str = rules.setting(
        "strided", rules.choice("strided", "sequential", "by_size")
    )
    """How blocks are dealt to fragments; `by_size` needs no blocks."""

    rest: str = rules.setting("balanced", rules.choice("balanced", "own"))
    """Whether tensors outside the blocks are distributed or form fragment 0."""

    overlap_steps: int = rules.setting(0, rules.integer(0, _MAX_STEPS))
    """Inner steps made between sending a fragment and adopting its outcome."""

    adopt: str = rules.setting("rebase", rules.choice("rebase", "mix"))
    """Whether local work made in flight is kept whole or blended with the anchor."""

    keep_local: float = rules.setting(0.0, _SHARE)
    """With `mix`, the share of the local weights that is kept."""

    dynamic_local_updates: bool = rules.setting(False, rules.FLAG)
    """Whether slower islands make fewer inner steps per round."""

    @cached_property
    def is_async(self) -> bool:
        """Whether rounds take who arrived. Read for every message of an island."""
        return self.mode == "async"

    def __post_init__(self) -> None:
        rules.check_fields(self, "sync")
        self._check_overlap()
        self._check_adopt()
        self._check_rest()
        self._check_windows()

    def _check_overlap(self) -> None:
        if self.overlap_steps >= self.sync_every:
            raise SettingsError(
                f"sync.overlap_steps={self.overlap_steps} must be below "
                f"sync.sync_every={self.sync_every}. "
                f"Choose at most {self.sync_every - 1}."
            )

    def _check_adopt(self) -> None:
        if self.adopt != "mix" and self.keep_local != 0.0:
            raise SettingsError(
                f"sync.keep_local={shortest_fp32(self.keep_local)} has no effect "
                f"with sync.adopt={self.adopt!r}. Remove it, or choose adopt='mix'."
            )
        if self.adopt == "mix" and self.overlap_steps and self.keep_local == 0.0:
            _warn(
                f"sync.adopt='mix' with sync.keep_local=0.0 discards the "
                f"{self.overlap_steps} inner steps made in flight out of every "
                f"{self.sync_every}. Choose adopt='rebase' to keep them."
            )

    def _check_rest(self) -> None:
        if self.rest != "own":
            return
        if self.num_fragments < 2:
            raise SettingsError(
                f"sync.rest='own' needs at least 2 fragments, one for the rest and "
                f"one for the blocks, but sync.num_fragments={self.num_fragments}. "
                "Choose num_fragments=2 or rest='balanced'."
            )
        if self.fragment_order == "by_size":
            raise SettingsError(
                "sync.rest='own' has no meaning with sync.fragment_order='by_size', "
                "which does not look for blocks. Choose rest='balanced'."
            )

    def _check_windows(self) -> None:
        if self.dynamic_local_updates and self.sync_every == 1:
            raise SettingsError(
                "sync.dynamic_local_updates=true has no effect with sync.sync_every=1: "
                "every island makes 1 inner step per round. Remove it, or raise "
                "sync_every."
            )


@dataclass(frozen=True, kw_only=True)
class WireSection:
    """`[wire]`: the precision of updates and outcomes on the wire."""

    up: str = rules.setting("bf16", rules.choice(*_UP))
    """Codec of an island's update."""

    down: str = rules.setting(
        "bf16",
        rules.choice(*_DOWN, refused=(("topk-2bit", _NO_MEMORY),)),
    )
    """Codec of the agreed mean; or `gather`: the updates themselves, as they came."""

    error_feedback: bool = rules.derived(
        rules.FLAG, default=lambda wire: wire.up in _BELOW_8_BITS
    )
    """Whether what encoding lost is added to the next update; true below 8 bits."""

    error_feedback_decay: float = rules.setting(1.0, _SHARE)
    """The share of that residual that is added."""

    def __post_init__(self) -> None:
        rules.check_fields(self, "wire")
        self._check_decay()
        self._check_down()

    @property
    def gathers(self) -> bool:
        """Whether an outcome may be its updates, one after another."""
        return self.down == GATHER

    @property
    def mean_codec(self) -> str:
        """The codec of a mean: fp32, which loses nothing, if updates are gathered."""
        return "fp32" if self.gathers else self.down

    def _check_decay(self) -> None:
        if self.error_feedback_decay != 1.0 and not self.error_feedback:
            raise SettingsError(
                "wire.error_feedback_decay="
                f"{shortest_fp32(self.error_feedback_decay)} has no effect while "
                f"wire.error_feedback is false (wire.up={self.up!r}). "
                "Remove it, or set error_feedback=true."
            )

    def _check_down(self) -> None:
        if self.down == "e3m0":
            _warn(
                "wire.down='e3m0' is lossy: the way down has no error feedback, and "
                "it raised the loss by 8 % in trials. Choose 'int8' to avoid that."
            )


@dataclass(frozen=True, kw_only=True)
class OuterSection:
    """`[outer]`: how a round's updates become the next anchor."""

    optimizer: str = rules.setting(
        "nesterov", rules.choice("nesterov", "heavy_ball", "sgd", "adam")
    )
    """The outer optimizer."""

    lr: float = rules.derived(
        _OUTER_LR, default=lambda outer: None if outer.optimizer == "adam" else 0.7
    )
    """The outer learning rate: 0.7, but to be chosen with `adam`."""

    momentum: float = rules.derived(
        _MOMENTUM, default=lambda outer: 0.0 if outer.optimizer == "sgd" else 0.9
    )
    """The outer momentum, Adam's first decay rate: 0.9, but 0.0 with `sgd`."""

    merge: str = rules.setting("mean", rules.choice("mean", "radial", "trimmed"))
    """How updates become one."""

    weight: str = rules.setting("uniform", rules.choice("uniform", "tokens"))
    """The measure of an update's share in the merge."""

    def __post_init__(self) -> None:
        rules.check_fields(self, "outer")
        self._check_optimizer()
        if self.merge == "trimmed" and self.weight != "uniform":
            raise SettingsError(
                f"outer.merge='trimmed' drops whole values, so that "
                f"outer.weight={self.weight!r} has no meaning. "
                "Choose weight='uniform' or merge='mean'."
            )

    def _check_optimizer(self) -> None:
        if self.lr is None:
            raise SettingsError(
                "outer.optimizer='adam' needs outer.lr: the usual 0.7 would move each "
                "weight by about 0.7 per round. Set outer.lr, for example to 0.001."
            )
        if self.optimizer == "sgd" and self.momentum:
            raise SettingsError(
                f"outer.momentum={shortest_fp32(self.momentum)} has no effect "
                "with outer.optimizer='sgd'. Remove it, or choose 'heavy_ball'."
            )


@dataclass(frozen=True, kw_only=True)
class AsyncSection:
    """`[async]`: rounds that take who arrived."""

    buffer: int | None = rules.setting(None, rules.maybe(_ISLANDS))
    """Updates between two moves of the velocity. Not set: the islands that are live
    when a round closes."""

    grace_s: float | None = rules.setting(
        None, rules.maybe(rules.number(0.0, _MAX_GRACE_S))
    )
    """Seconds for which a round stays open after its first update. Not set: half of
    the time that the fastest island takes for `sync.overlap_steps`."""

    staleness: str = rules.unwritten(
        "none", rules.choice("none", "inverse", "inverse_root", "exponential")
    )
    """How an update's age in rounds lowers its weight."""

    def __post_init__(self) -> None:
        rules.check_fields(self, "async")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """`[data]`: how rows of the data are assigned to islands."""

    order: str = rules.unwritten("islands", rules.choice("islands", "run"))
    """`islands`: each cuts a share by its slot. `run`: the run deals rows out."""

    unit_rows: int = rules.unwritten(1024, rules.integer(1, MAX_UNIT_ROWS))
    """Rows that are dealt together."""

    passes: int = rules.unwritten(1, rules.integer(0, MAX_PASSES))
    """Times that each row is dealt; 0: without end."""

    shuffle: bool = rules.unwritten(True, rules.FLAG)
    """Whether rows are dealt in an order of the run's own, or as they lie."""

    seed: int = rules.unwritten(0, rules.integer(0, _MAX_COUNT))
    """Of that order."""

    def __post_init__(self) -> None:
        rules.check_fields(self, "data")
        if not self.is_dealt:
            self._check_unused()

    @property
    def is_dealt(self) -> bool:
        """Whether the run deals rows out."""
        return self.order == "run"

    def _check_unused(self) -> None:
        for name, default in _DEALING.items():
            value = getattr(self, name)
            if value != default:
                raise SettingsError(
                    f"data.{name}={shown(value)} has no effect with "
                    "data.order='islands'. Remove it, or choose order='run'."
                )


_DEALING = {"unit_rows": 1024, "passes": 1, "shuffle": True, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class StoreSection:
    """`[store]`: runs without a coordinator."""

    decider: str | None = rules.setting(None, rules.maybe(rules.NAME))
    """The one island that may close rounds where the store cannot put-if-absent."""

    def __post_init__(self) -> None:
        rules.check_fields(self, "store")


@dataclass(frozen=True, kw_only=True)
class LimitsSection:
    """`[limits]`: bounds beyond which updates are refused, and the longest waits."""

    max_update_norm: float = rules.setting(10.0, rules.number(1.0))
    """Times the reference norm (docs/protocol.md); beyond it an update is refused."""

    max_step_tokens: int = rules.setting(2**26, rules.integer(1, 2**32))
    """Tokens that one island may train on in one inner step."""

    max_body_bytes: int = rules.setting(64 * 2**30, _COUNT)
    """The largest body of a frame that is read."""

    max_constants_bytes: int = rules.setting(256 * 2**30, rules.integer(0, _MAX_COUNT))
    """Largest total size of a founder's constants; 0: the run stores none of them."""

    deadline_min_s: float = rules.setting(1.0, _POSITIVE)
    """The shortest learned deadline."""

    deadline_max_s: float = rules.setting(600.0, _POSITIVE)
    """The longest learned deadline, and the one until an island's pace is known."""

    def __post_init__(self) -> None:
        rules.check_fields(self, "limits")
        if self.deadline_min_s > self.deadline_max_s:
            raise SettingsError(
                f"limits.deadline_min_s={self.deadline_min_s} exceeds "
                f"limits.deadline_max_s={self.deadline_max_s}. "
                f"Choose at most {self.deadline_max_s}."
            )


def _warn(message: str) -> None:
    # Five levels up is the line that makes the section, when the caller is a method
    # that __post_init__ calls.
    warnings.warn(message, AtollWarning, stacklevel=5)
