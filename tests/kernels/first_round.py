"""A coordinator's first round, after which it is told what numba had to load for it.

    python -m tests.kernels.first_round UP DOWN OPTIMIZER MODE

Prints how many functions were compiled or loaded before the round, and during it.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np

from atoll import RunSettings, kernels
from atoll.island.numpy_model import vector_model
from atoll.kernels.layouts import STATE_PIECE
from atoll.protocol.rounds import judge_updates
from atoll.settings import OuterSection, SyncSection, WireSection
from atoll.weights import FragmentState, UpdateCheck, agree, lay_out, seal, terms_of
from atoll.weights.reduce import Framed
from atoll.wire import FrameKind, Header, with_body

ELEMENTS = 2 * STATE_PIECE + 3


def count_compiled() -> int:
    """Return for how many types all kernels have machine code, taken together."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("atoll.kernels.with_numba")
    ]
    return sum(
        len(function.signatures)
        for module in modules
        for function in vars(module).values()
        if type(function).__name__ == "CPUDispatcher"
    )


def spooled(body: np.ndarray) -> np.ndarray:
    """Return a body as it lies in the spool: in a file that can only be read."""
    mapped = mmap.mmap(-1, len(body))
    mapped.write(body.tobytes())
    readable = np.frombuffer(mapped, np.uint8)
    readable.flags.writeable = False
    return readable


def settings_of(up: str, down: str, optimizer: str, mode: str) -> RunSettings:
    lr = 0.001 if optimizer == "adam" else 0.7
    return RunSettings(
        sync=SyncSection(mode=mode),
        wire=WireSection(up=up, down=down),
        outer=OuterSection(optimizer=optimizer, lr=lr, weight="tokens"),
    )


def updates(settings: RunSettings, weights: dict[str, int]) -> dict[str, Framed]:
    """Return what islands of these weights bring."""
    (layout,) = lay_out(vector_model({"w": (ELEMENTS,)}), settings)
    up = terms_of(layout, settings).up
    body = np.empty(up.body_bytes(ELEMENTS), np.uint8)
    kernels.use("numpy")  # an island's own kernels are no business of this
    norm = seal(layout, None, np.ones(ELEMENTS, np.float32), body, up=up)
    kernels.use("numba")
    headers = {
        name: Header(
            kind=FrameKind.UPDATE,
            run="run",
            fragment=0,
            round=1,
            island=name,
            incarnation=1,
            codec=up.name,
            elements=ELEMENTS,
            weight=weight,
            norm=norm,
        )
        for name, weight in weights.items()
    }
    return {name: (with_body(each, body), body) for name, each in headers.items()}


def reduced(settings: RunSettings, came: dict[str, Framed]) -> None:
    """Judge what comes, reduce it and take the outer steps.

    In an asynchronous run the updates fill their buffer, and then only a part of it.
    """
    (layout,) = lay_out(vector_model({"w": (ELEMENTS,)}), settings)
    terms = terms_of(layout, settings)
    for header, body in came.values():
        check = UpdateCheck(header, layout, terms)
        check.decoded(np.frombuffer(bytearray(body.tobytes()), np.uint8), ELEMENTS)
        check.finish()
    headers = [header for header, _ in came.values()]
    roster = judge_updates(
        headers,
        round=headers[0].round,
        base=headers[0].base,
        known_bases=(),
        norms={},
        window_of=lambda _: 1,
        counted=lambda island: None,
        settings=settings,
    )
    for buffer in (len(came), 2 * len(came)) if settings.sync.is_async else (0,):
        optimizer = terms.outer.optimizer
        state = FragmentState.found(np.zeros(ELEMENTS, np.float32), optimizer)
        agreed, mean = agree(
            layout,
            terms,
            roster,
            {name: (header, spooled(body)) for name, (header, body) in came.items()},
            run="run",
            fragment=0,
            round=1,
            base=state.digest,
            outer=terms.outer,
            buffer=buffer,
        )
        state.apply(agreed, mean)


def main() -> None:
    up, down, optimizer, mode = sys.argv[1:]
    settings = settings_of(up, down, optimizer, mode)
    even = updates(settings, {"a": 1, "b": 1, "c": 1, "d": 1})
    uneven = updates(settings, {"a": 1, "b": 2})
    is_async = settings.sync.is_async
    kernels.warm(up=up, down=down, optimizer=optimizer, is_async=is_async)
    before = count_compiled()
    reduced(settings, even)
    reduced(settings, uneven)
    sys.stdout.write(f"{before} {count_compiled() - before}")


if __name__ == "__main__":
    main()
