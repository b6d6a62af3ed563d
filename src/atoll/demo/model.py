"""The model of the demo, its rows of text and its recipe.

The model is a transformer over bytes: no vocabulary to download, small enough for a
laptop. Islands and data parallel share all of this, so that only the exchange differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.demo.dataset import Era
from atoll.errors import UsageError
from atoll.settings import RunSettings

CONTEXT = 64
"""Bytes that a prediction may look back."""

WIDTH, DEPTH, HEADS = 128, 4, 4


class Block(nn.Module):
    """Attention over what came before, then a small network; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_mixing = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.before_thinking = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, turns: Tensor) -> Tensor:
        hidden = hidden + self._mix(self.before_mixing(hidden), turns)
        wide = functional.gelu(self.wide(self.before_thinking(hidden)))
        out: Tensor = hidden + self.narrow(wide)
        return out

    def _mix(self, hidden: Tensor, turns: Tensor) -> Tensor:
        shape = (*hidden.shape[:2], self.heads, -1)
        parts = self.queries_keys_values(hidden).chunk(3, dim=-1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(
            _turned(query, turns), _turned(key, turns), value, is_causal=True
        )
        out: Tensor = self.mixed(mixed.transpose(1, 2).flatten(2))
        return out


class GPT(nn.Module):
    """Predicts the next byte. The same seed gives the same weights.

    Places are told by rotation (arXiv 2104.09864) rather than learnt: a run of a few
    hundred steps has no time to learn where a byte is.
    """

    turns: Tensor

    def __init__(
        self,
        *,
        width: int = WIDTH,
        depth: int = DEPTH,
        heads: int = HEADS,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.last = nn.LayerNorm(width)
        self.register_buffer("turns", _turns(width // heads), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, weights in self.named_parameters():
            _start(name, weights, 0.5 * width**-0.5, generator)

    def forward(self, text: Tensor) -> Tensor:
        """Return a score for each of the 256 bytes that may follow each place."""
        hidden, turns = self.byte(text), self.turns[:, : text.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, turns)
        scores: Tensor = self.last(hidden) @ self.byte.weight.T
        return scores


def _start(
    name: str, weights: nn.Parameter, std: float, generator: torch.Generator
) -> None:
    """Give a weight its first value; what adds to a block's input starts small."""
    if weights.dim() == 2:
        adds = name.endswith(("mixed.weight", "narrow.weight"))
        std = 0.3 * std if adds else std
        nn.init.normal_(weights, std=std, generator=generator)
    elif name.endswith("bias"):
        nn.init.zeros_(weights)


def _turns(size: int) -> Tensor:
    """Return the cosine and sine by which each place turns each pair of values."""
    speeds = 1000.0 ** -(torch.arange(size // 2) / (size // 2))
    angles = torch.arange(CONTEXT)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()])


def _turned(values: Tensor, turns: Tensor) -> Tensor:
    """Return queries or keys of one length, turned by their places.

    One length keeps attention calm at the high rates that a short run needs.
    """
    first, second = functional.rms_norm(values, values.shape[-1:]).chunk(2, dim=-1)
    cosine, sine = turns
    return torch.cat(
        [first * cosine - second * sine, first * sine + second * cosine], dim=-1
    )


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean loss, in nats per byte, of rows of a context and a byte more."""
    scores = model(rows[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor) -> float:
    """Return the loss on text that nobody has trained on, a few rows at a time."""
    was_training = model.training
    model.eval()
    losses = [
        float(loss_of(model, rows)) * len(rows) for rows in torch.split(held_out, 32)
    ]
    model.train(was_training)
    return sum(losses) / len(held_out)


@torch.no_grad()
def write(model: nn.Module, opening: str, *, length: int, seed: int = 0) -> str:
    """Return `length` more bytes after the opening, as the model would have them."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(opening.encode())])
    for _ in range(length):
        scores = model(text[:, -CONTEXT:])[0, -1]
        # A little colder than learnt: a young model's rare bytes are mostly noise.
        chances = functional.softmax(scores / 0.7, dim=-1)
        byte = torch.multinomial(chances, 1, generator=generator)
        text = torch.cat([text, byte[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


HELD_OUT_ROWS = 128
"""So many rows, over all eras, tell losses apart that differ by a percent."""


def batches(text: bytes, *, rows: int, seed: int) -> Iterator[Tensor]:
    """Yield rows of one context and a byte more from anywhere in the text, endlessly.

    The same text, number of rows and seed give the same batches.
    """
    generator, values = torch.Generator().manual_seed(seed), _values(text)
    while True:
        yield _rows(values, rows, generator)


def held_out_rows(eras: Sequence[Era], *, rows: int = HELD_OUT_ROWS) -> Tensor:
    """Return the rows that everyone is judged by, as many from each era."""
    generator = torch.Generator().manual_seed(0)
    each = -(-rows // len(eras))
    return torch.cat([_rows(_values(era.held_out), each, generator) for era in eras])


def _values(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _rows(values: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    first = torch.randint(len(values) - CONTEXT, (rows, 1), generator=generator)
    return values[first + torch.arange(CONTEXT + 1)].long()


ROWS = 4
"""Rows of a batch on one island; data parallel takes as many of every era.

More would mean fewer steps on as many tokens: with 8, islands end 8 % above data
parallel instead of 5 %, and both learn less.
"""

DATA_PARALLEL_LR = 3e-3
"""What suits data parallel itself: 2.5e-3 to 4e-3 came to the same, 6.5e-3 to worse."""

WARMUP_SHARE, LAST_SHARE = 0.15, 0.05


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer that an island steps, and data parallel as well."""
    return torch.optim.AdamW(
        model.parameters(), DATA_PARALLEL_LR, betas=(0.9, 0.98), fused=True
    )


def inner_lr(settings: RunSettings) -> float:
    """Return the peak rate of an island: the outer step makes a drift larger.

    A steady drift grows by lr / (1 - momentum), so the inner rate shrinks by it.
    """
    outer = settings.outer
    return DATA_PARALLEL_LR * (1 - outer.momentum) / outer.lr


def set_lr(optimizer: torch.optim.Optimizer, peak: float, *, done: float) -> None:
    """Set the rate for a share of the steps that is done: up, then down a cosine."""
    up = min(1.0, (done + 1e-3) / WARMUP_SHARE)
    down = max(0.0, min(1.0, (done - WARMUP_SHARE) / (1 - WARMUP_SHARE)))
    cosine = LAST_SHARE + (1 - LAST_SHARE) * (1 + math.cos(math.pi * down)) / 2
    for group in optimizer.param_groups:
        group["lr"] = peak * up * cosine


def num_rounds(settings: RunSettings) -> int:
    """Return the run's last round.

    Raises:
        UsageError: it has none, so a schedule would have no end.
    """
    if settings.run.end_rounds is None:
        raise UsageError("run.end_rounds is not set, but the demo must end. Set it.")
    return settings.run.end_rounds


def num_steps(settings: RunSettings) -> int:
    """Return the inner steps of each island until the last round is sent."""
    return num_rounds(settings) * settings.sync.sync_every
