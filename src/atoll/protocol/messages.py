"""Messages between islands and a run, apart from frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.errors import ModelError
from atoll.protocol.model import ModelSpec
from atoll.settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class CountedWork:
    """The last update of an island that counted in a fragment."""

    round: int
    inner_steps: int
    tokens: int
    incarnation: int = field(default=0, compare=False)
    """The incarnation that published it; 0: unknown."""

    listed: int = 0
    """The last round that lists an update of the island, if that one was refused; 0: it
    is `round`. In an asynchronous run."""


@dataclass(frozen=True)
class HeldRound:
    """The last round of a fragment that an island has taken."""

    round: int
    digest: bytes
    """Of its anchor and velocity after that round."""

    receipt: bytes = b""
    """The run's proof that it has committed this; the host checks and removes it
    before the machine sees it."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """The run's position. Outcomes, join replies and heartbeats carry it."""

    step: int
    """The schedule step that the live islands have reached."""

    rounds: tuple[int, ...]
    """The open round of each fragment; the first round is 1."""

    last_round: int | None = None
    """No fragment opens a round beyond this one."""

    last_rounds: tuple[int, ...] | None = None
    """The last round of each fragment, in an asynchronous run whose end is decided."""

    tokens: int = 0
    """Sum over islands of the lowest counted progress of their fragments."""

    wanted: tuple[int, ...] = ()
    """All islands wait, and the open rounds of these fragments wait for this one."""

    lost: tuple[int, ...] = ()
    """The run has lost rounds of these fragments: upload this island's state."""

    saves: int = 0
    """Number of operators' requests to save."""

    decay_round: int | None = None
    """Learning rates fall from the first inner step of this round on."""

    end_tokens: int | None = None
    """The run ends when this number of tokens has counted."""


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A request of an island to join."""

    model: ModelSpec
    island: str | None = None
    """None: the run assigns a name."""

    incarnation: int | None = None
    """Of an incarnation that the run has lost the record of. None: a new one."""

    after: int = 0
    """The latest known incarnation of the name, which this one replaces."""

    returns: bool = False
    """It resumes exactly after a crash: a round waits for its next incarnation."""

    bundle: str = ""
    """The digest of the bundle that its model was built from; empty: none."""

    holds: tuple[HeldRound, ...] = ()
    """With an incarnation: the last round of each fragment that it has taken."""

    def require_bundle(self, settings: RunSettings) -> None:
        """Return unless the model was built from another bundle than the run's.

        Raises:
            ModelError: it was, and from which.
        """
        if self.bundle in ("", settings.run.bundle):
            return
        run = settings.run.bundle
        run_bundle = f"is defined by bundle {run[:12]}" if run else "has no bundle"
        raise ModelError(
            f"This island's model was built from bundle {self.bundle[:12]}, and the "
            f"run {run_bundle}: a file differs, so it is another model. Build it again "
            "from the run, with atoll.torch.from_run."
        )


@dataclass(frozen=True, kw_only=True)
class JoinReply:
    """The run's reply: all values that an island must share with the others."""

    run: str
    island: str
    incarnation: int
    slot: int
    """A small number that belongs to the island's name during the whole run."""

    settings: RunSettings
    epoch: int
    position: Position
    is_founder: bool
    """True: publish the state of every fragment before anything else."""

    inner_steps: int = 0
    tokens: int = 0
    """Counted progress of earlier incarnations of the name; it is cumulative."""

    spoken_for: tuple[int, ...] = ()
    """Fragments whose open round has a valid update of an earlier incarnation."""

    counted: tuple[CountedWork | None, ...] = ()
    """For each fragment the name's last counted update, of any incarnation."""

    window: int = 0
    """Inner steps per window of the name, by the last roster that lists it; 0: of no
    roster, or `sync_every`."""

    held_rows: bytes = b""
    """Packed spans: the turns that the name holds and that no fragment has counted,
    refused or staged. Its next incarnation trains on them before it claims others."""

    last_claim: int = 0
    """The number of the name's last claim of rows; 0: it has made none."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """An island's statistics, for people. No decision depends on them."""

    version: str = ""
    """Of Atoll."""

    seconds: float = 0.0
    """Since it joined."""

    inner_steps: int = 0
    tokens: int = 0
    loss: float | None = None
    """As last reported; None before that, and when it is not finite."""

    wait_s: float = 0.0
    """How long its training stood still for outcomes."""

    bytes_up: int = 0
    bytes_down: int = 0
    first_batch: str | None = None
    """A digest of its first batch: two islands should not have the same."""

    dropped_steps: int | None = None
    """Inner steps whose work was dropped after too many missed rounds; None: none."""

    loss_is_finite: bool | None = None
    """False: the last loss was not a number, or infinite. None: no loss yet."""

    metrics: Mapping[str, float] | None = None
    """Other metrics that the loop reported last, finite ones."""

    anchor_metrics: Mapping[str, float] | None = None
    """Metrics of the anchor of `anchor_round`, as last evaluated."""

    anchor_round: int | None = None
    exchange_s: float | None = None
    """From seal to outcome, of the last exchange of each fragment, summed."""

    hidden_s: float | None = None
    """The part of it in which the island trained."""

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    rtt_s: float | None = None
    """The round trip to the run."""

    carried: int | None = None
    """Updates that missed a round and were carried into the next."""

    dropped: int | None = None
    """Updates that were dropped after too many missed rounds."""

    store_usd: float | None = None
    """The price of its requests to a store."""

    machine: str | None = None
    """Its devices and its framework."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """An island's heartbeat."""

    island: str
    incarnation: int
    step: int
    waits_for: tuple[int, int] | None = None
    """The fragment and round whose outcome its training waits for."""

    holds: tuple[HeldRound, ...] = ()
    """The last round of each fragment that it has taken."""

    stats: Stats | None = None
    step_s: float | None = None
    """Its pace: the median of its last inner steps; None before some are known."""
