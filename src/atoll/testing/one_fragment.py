"""A run small enough for one's head: one fragment of three elements, starting at zero.

Outer SGD with lr 1 and fp32 both ways, so the anchor moves by minus the mean of the
updates, exactly: updates of 1 and 3 take it from 0 to -2.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from atoll.exchange import Exchange, Frame, Outcome
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinReply, JoinRequest, ModelSpec
from atoll.settings import RunSettings
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, OuterValues, Roster, Verdict, with_body

MODEL = vector_model({"w": (3,)})
OUTER = OuterValues(optimizer="sgd", lr=1.0, momentum=0.0)


def plain_settings(**run: object) -> RunSettings:
    """Return the settings of plain averaging; `run` is the run file's `[run]`."""
    return RunSettings.from_dict(
        {
            "run": run,
            "wire": {"up": "fp32", "down": "fp32"},
            "outer": {"optimizer": "sgd", "lr": 1.0},
        }
    )


def enter(exchange: Exchange, island: str, *, model: ModelSpec = MODEL) -> JoinReply:
    """Join, and found the run with zeros if nobody has."""
    joined = exchange.join(JoinRequest(model=model, island=island))
    if joined.is_founder:
        state = FragmentState.found(np.zeros(3, np.float32), "sgd")
        header, body = state.to_frame(
            run=joined.run,
            fragment=0,
            outer=OUTER,
            island=island,
            incarnation=joined.incarnation,
        )
        exchange.publish(Frame(header, body))
    return joined


def update_of(
    exchange: Exchange,
    joined: JoinReply,
    value: float,
    *,
    round: int = 1,
    **fields: object,
) -> Frame:
    """Return an update of three equal values, sealed on the run's present state."""
    body = np.full(3, value, np.float32).view(np.uint8)
    header = Header(
        kind=FrameKind.UPDATE,
        run=joined.run,
        fragment=0,
        round=round,
        island=joined.island,
        incarnation=joined.incarnation,
        base=exchange.state(0).header.base,
        elements=3,
        norm=float(np.sqrt(3.0) * abs(value)),
    )
    return Frame(replace(with_body(header, body), **fields), body)  # type: ignore[arg-type]


def anchor_of(exchange: Exchange) -> float:
    """Return the first element of the run's anchor; all three are alike."""
    return float(exchange.state(0).body.view(np.float32)[0])


def outcome_of(exchange: Exchange, round: int) -> Outcome:
    """Return a round's outcome, which must be there."""
    outcome = exchange.outcome(0, round, wait_s=0.0)
    assert isinstance(outcome, Outcome), f"round {round} has no outcome yet"
    return outcome


def roster_of(exchange: Exchange, round: int) -> Roster:
    """Return the roster of a round that is over."""
    roster = outcome_of(exchange, round).agreed.header.roster
    assert roster is not None
    return roster


def verdicts_of(exchange: Exchange, round: int) -> dict[str, Verdict]:
    """Return what became of each island's update."""
    return {entry.island: entry.verdict for entry in roster_of(exchange, round).entries}
