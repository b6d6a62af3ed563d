"""What islands and a run say to each other, apart from frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from atoll.errors import ModelError
from atoll.protocol.counted import Counted
from atoll.settings import RunSettings

Role = Literal["parameter", "buffer", "constant"]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of the model, as all islands must have it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As numpy and torch spell it: float32, bfloat16, int64."""

    role: Role
    """parameter and buffer are carried; a constant is only compared."""

    digest: str = ""
    """Of a constant's bytes, in hex; empty for what is carried."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        digest = f" with digest {self.digest[:12]}" if self.digest else ""
        return f"{self.role} of shape {shape} and dtype {self.dtype}{digest}"


@dataclass(frozen=True)
class ModelSpec:
    """Every tensor of a model, in the model's own order."""

    tensors: tuple[TensorSpec, ...]

    def with_role(self, role: Role) -> tuple[TensorSpec, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.role == role)

    def require_same(self, run: ModelSpec) -> None:
        """Return when this island's model is the run's.

        Raises:
            ModelError: naming the first tensor that differs, and both sides.
        """
        for fact in _differences(self, run):
            raise ModelError(
                f"{fact} Build the model as the run's founder did, or start a new run."
            )


def _differences(island: ModelSpec, run: ModelSpec) -> Iterator[str]:
    mine = {tensor.name: tensor for tensor in island.tensors}
    theirs = {tensor.name: tensor for tensor in run.tensors}
    for name, tensor in theirs.items():
        if name not in mine:
            yield f"{name!r} is a {tensor} in the run, and absent from this island."
        elif mine[name] != tensor:
            yield (
                f"{name!r} is a {tensor} in the run, and a {mine[name]} in this island."
            )
    for name, tensor in mine.items():
        if name not in theirs:
            yield f"{name!r} is a {tensor} in this island, and absent from the run."
    for place, (name, expected) in enumerate(zip(mine, theirs, strict=False)):
        if name != expected:
            yield (
                f"Tensor {place} is {expected!r} in the run, and {name!r} in this "
                "island: the order differs."
            )


@dataclass(frozen=True)
class Holding:
    """The last round of a fragment that an island has taken."""

    round: int
    digest: bytes
    """Of its anchor and velocity after that round."""

    receipt: bytes = b""
    """The run's proof that it has committed this; checked and removed by the host
    before the machine sees it."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the run is. Outcome, join reply and heartbeat carry it."""

    step: int
    """The schedule step that the live islands have reached."""

    rounds: tuple[int, ...]
    """The open round of each fragment; the first round is 1."""

    last_round: int | None = None
    """No fragment opens a round beyond this one."""

    tokens: int = 0
    """Sum over islands of the lowest counted progress of their fragments."""

    wanted: tuple[int, ...] = ()
    """Everybody waits, and the open rounds of these fragments wait for this island."""

    lost: tuple[int, ...] = ()
    """The run has lost rounds of these fragments: bring it this island's state."""

    saves: int = 0
    """How often an operator has asked every island to save itself."""

    decay_round: int | None = None
    """Learning rates fall from the first inner step of this round on."""

    end_tokens: int | None = None
    """The run ends when so many tokens have counted."""


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """An island asks to take part."""

    model: ModelSpec
    island: str | None = None
    """None: the run gives a name."""

    incarnation: int | None = None
    """Of a life that goes on, at a run that has lost its record. None: a new life."""

    after: int = 0
    """The latest life of the name that this one knows of: it takes that one's place."""

    returns: bool = False
    """It goes on from a checkpoint when it dies: a round waits for its next life."""

    bundle: str = ""
    """The digest of the bundle that its model was built from; empty: of its own."""

    holds: tuple[Holding, ...] = ()
    """With an incarnation: what this life has taken of each fragment."""

    def require_bundle(self, settings: RunSettings) -> None:
        """Return unless the model was built from another bundle than the run's.

        Raises:
            ModelError: it was, and from which.
        """
        if self.bundle in ("", settings.run.bundle):
            return
        run = settings.run.bundle
        theirs = f"is defined by bundle {run[:12]}" if run else "has no bundle"
        raise ModelError(
            f"This island's model was built from bundle {self.bundle[:12]}, and the "
            f"run {theirs}: a file differs, so it is another model. Build it anew "
            "from the run, with atoll.torch.from_run."
        )


@dataclass(frozen=True, kw_only=True)
class JoinReply:
    """The run's answer: everything an island must share with the others."""

    run: str
    island: str
    incarnation: int
    slot: int
    """A small number that belongs to the island's name for the life of the run."""

    settings: RunSettings
    epoch: int
    position: Position
    is_founder: bool
    """True: publish the state of every fragment before anything else."""

    inner_steps: int = 0
    tokens: int = 0
    """What earlier lives of the name have counted: progress is cumulative."""

    spoken_for: tuple[int, ...] = ()
    """Fragments whose open round holds an update of an earlier life, which stands."""

    counted: tuple[Counted | None, ...] = ()
    """Of each fragment the name's last update that counted, of whatever life."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What an island tells people of itself. Nothing is decided by it."""

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
    """A digest of what it has begun with: two islands should not have the same."""

    dropped_steps: int | None = None
    """Inner steps whose work was dropped after too many missed rounds; None: none."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What an island says of itself between rounds."""

    island: str
    incarnation: int
    step: int
    waits_for: tuple[int, int] | None = None
    """The fragment and round whose outcome its training stands still for."""

    holds: tuple[Holding, ...] = ()
    """What it has taken of each fragment."""

    stats: Stats | None = None
