"""A transformer over bytes: no vocabulary to download, small enough for a laptop."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

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
