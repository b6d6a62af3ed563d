"""Rounds that do not go as planned, as the ranks of an island live through them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import atoll.torch
from atoll import RunSettings
from atoll.errors import LeaseLost
from atoll.exchange import Exchange, Frame, MemoryRun, Outcome
from atoll.island import Host
from atoll.island.saved_state import SavedIsland, from_tree, to_tree
from atoll.protocol import (
    Heartbeat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
)
from atoll.torch import Island, Stage
from atoll.torch.model import HostWeights, TorchModel, TorchView
from atoll.torch.ranks.join import RankHandle, form
from atoll.torch.ranks.parallelism import rank_group_of
from atoll.torch.ranks.sharded_memory import ShardedMemory
from atoll.torch.ranks.view import RankConstants, RankView
from atoll.wire import FrameKind
from tests.island.scripted import ISLAND, ScriptedRun
from tests.island.windows import WindowRun
from tests.torch.rank_loops import (
    Net,
    net,
    rows_of,
    send_through,
    settings,
    stage,
    steps,
    wrapped,
)


def island_at(
    exchange: Exchange,
    model: torch.nn.Module | Stage,
    optimizer: torch.optim.Optimizer,
) -> Island:
    """Join any exchange, by all ranks or alone."""
    team = rank_group_of(model)
    module = model.module if isinstance(model, Stage) else model
    if team is None:
        torch_model = TorchModel.of(module)
        view = TorchView(torch_model)
        request = JoinRequest(model=torch_model.spec, island="a")
        host = Host(exchange, view, request)
        weights = HostWeights(host, view)
        return Island(host, weights, [module], optimizer, on_end="raise")

    def enter(
        view: RankView,
        spec: ModelSpec,
        memory: ShardedMemory,
        constants: RankConstants,
    ) -> Host:
        request = JoinRequest(model=spec, island="a")
        return Host(exchange, view, request, memory=memory)

    rank = form(team, enter)
    return Island(rank, rank, [module], optimizer, on_end="raise")


def make_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    kind: str,
    rank: int,
    count: int,
) -> None:
    """Make inner steps; alone with the micro-batches of two ranks."""
    for step in range(count):
        for part in [rank] if kind != "alone" else [0, 1]:
            loss = model(rows_of(0, step, part)).square().mean()
            (loss / (2 if kind == "alone" else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def leave_early(rank: int, kind: str, run: RunSettings, steps: int) -> list[str]:
    """Leave in the middle of a window; return what the run has of it afterwards."""
    model = wrapped(kind, net(0), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    where = MemoryRun(run)
    with island_at(where, model, optimizer):
        make_steps(model, optimizer, kind, rank, steps)
    if rank:
        return []
    return [where.state(index).header.base.hex() for index in range(3)]


def live_through(rank: int, kind: str, run: RunSettings, script: str) -> dict[str, Any]:
    """Live through rounds that count, miss or pass as a script says, over and over."""
    fates = {"c": "counted", "m": "missed", "p": "passed", "t": "passed thrice"}
    words: Iterator[str] = cycle([fates[letter] for letter in script])
    whole = net(0)
    del whole.seen  # rounds of another fragment would come when they come
    model = wrapped(kind, whole, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with island_at(ScriptedRun(run, words), model, optimizer) as island:
        make_steps(model, optimizer, kind, rank, 10_000)
    metrics = island.metrics()
    return {"digest": island.digest} | {
        name: metrics[f"atoll/updates_{name}"] for name in ("counted", "carried")
    }


def train_windows(
    rank: int, kind: str, run: RunSettings, windows: tuple[int, ...]
) -> dict[str, Any]:
    """Train in a run whose rosters give these windows, round by round, over and over.

    A pipeline, and the model that is not cut, train on the rows of one rank.
    """
    exchange = WindowRun(
        MemoryRun(run), lambda _, round: windows[(round - 1) % len(windows)]
    )
    part = stage(rank, 0) if kind == "pipeline" else wrapped(kind, net(0), 2)
    module = part.module if isinstance(part, Stage) else part
    micro_batches = {"alone": [0, 1], "whole": [0]}.get(kind, [rank])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    run_steps = []
    with island_at(exchange, part, optimizer) as island:
        for step in steps():
            run_steps.append(island.run_steps)
            if kind == "pipeline":
                send_through(rank, module, rows_of(0, step, 0), 7)
            for number in micro_batches if kind != "pipeline" else []:
                loss = module(rows_of(0, step, number)).square().mean()
                (loss / len(micro_batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"digest": island.digest, "run_steps": run_steps}


class PassingRun(ScriptedRun):
    """A run whose first round passes without the island's first update.

    The update is lost with the incarnation that has published it.
    """

    def __init__(self, run: RunSettings) -> None:
        super().__init__(run, cycle(["counted"]), others=0.25)
        self.has_passed = threading.Event()
        """Set when the island has taken the round, and looks for the next one."""

    def join(self, request: JoinRequest) -> JoinReply:
        if not self.fragments:
            return super().join(request)
        return JoinReply(
            run="run",
            island=ISLAND,
            incarnation=2,
            slot=0,
            settings=self.settings,
            epoch=0,
            position=self._position(),
            is_founder=False,
        )

    def publish(self, frame: Frame) -> Reception:
        is_state = frame.header.kind is FrameKind.STATE
        if is_state or frame.header.incarnation > 1:
            return super().publish(frame)
        self.pass_rounds(1, fragment=frame.header.fragment)
        return Reception.STAGED

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        if round in self.fragments[fragment].outcomes:
            return super().outcome(fragment, round, wait_s=wait_s, has_body=has_body)
        self.has_passed.set()
        with self._never:
            self._never.wait(wait_s)
        return None

    _never = threading.Condition()


def handle_at(
    exchange: Exchange, model: torch.nn.Module, saved: SavedIsland | None
) -> Host | RankHandle:
    """Join any exchange, by all ranks or alone, and resume from a checkpoint."""
    team = rank_group_of(model)
    if team is None:
        torch_model = TorchModel.of(model)
        request = JoinRequest(model=torch_model.spec, island=ISLAND)
        return Host(exchange, TorchView(torch_model), request, saved=saved)

    def enter(
        view: RankView,
        spec: ModelSpec,
        memory: ShardedMemory,
        constants: RankConstants,
    ) -> Host:
        request = JoinRequest(model=spec, island=ISLAND)
        return Host(exchange, view, request, memory=memory, saved=saved)

    return form(team, enter, saved=saved.fragments if saved else ())


def rejoin_behind(rank: int, kind: str, run: RunSettings) -> str:
    """Save while the anchor moves without the update in flight; die, and rejoin.

    Return the digest of the run's state once the rejoined island has counted.
    """
    exchange = PassingRun(run)
    saved: SavedIsland | None = None
    for steps_made in (5, 4):
        whole = net(0)
        del whole.seen
        model = wrapped(kind, whole, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = handle_at(exchange, model, saved)
        for _ in range(steps_made):
            make_steps(model, optimizer, kind, rank, 1)
            handle.stepped()
        if saved is not None:
            handle.leave(depart=False, is_alone=False)
            continue
        assert rank or exchange.has_passed.wait(60.0)
        with handle.saving(is_exact=False) as island:
            saved = from_tree(copy.deepcopy(to_tree(island)))
        handle.pause()
    return "" if rank else exchange.fragments[0].state.digest.hex()


class Losing:
    """An `Exchange` whose island loses its lease between two synchronisations."""

    def __init__(self, run: MemoryRun) -> None:
        self._run, self._beats = run, 0
        self.join, self.publish, self.state = run.join, run.publish, run.state
        self.outcome, self.leave = run.outcome, run.leave

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        self._beats += 1
        if self._beats > 4:
            raise LeaseLost("Another incarnation holds the name.")
        return self._run.heartbeat(beat, at_once=at_once)


def lose_the_lease(rank: int) -> tuple[str, str]:
    """Train until the leader learns that it has lost its lease."""
    run = MemoryRun(settings(1, sync={"sync_every": 2**20}))
    model = wrapped("ddp", net(0), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    try:
        with island_at(Losing(run), model, optimizer):
            make_steps(model, optimizer, "ddp", rank, 10_000)
    except Exception as exc:
        return type(exc).__name__, str(exc)
    return "", ""


def frozen(model: Net) -> Net:
    """Freeze a layer: a constant of the run."""
    model.layers[0].requires_grad_(False)
    return model


def train_frozen(rank: int, kind: str, url: str, name: str) -> str:
    """Train the rest of a model whose first layer is frozen, until the run ends."""
    model = wrapped(kind, frozen(net(0)), 2)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    with atoll.torch.join(model, optimizer, url, island=name) as island:
        make_steps(model, optimizer, kind, rank, 10_000)
    return island.digest


def train_world_of_one(rank: int, kind: str, run: RunSettings) -> str:
    """Train as the only rank of a world."""
    store = dist.HashStore()  # type: ignore[attr-defined] # it is there
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    makes: dict[str, Callable[[Net], torch.nn.Module]] = {
        "ddp": DistributedDataParallel,
        "fsdp": lambda model: wrapped("fsdp", model, 1),
        "alone": lambda model: model,
    }
    model = makes[kind](net(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with atoll.torch.join(model, optimizer, MemoryRun(run), island="a") as island:
        for step in range(10_000):
            model(rows_of(0, step, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return island.digest
