"""An island that trains a character-level GPT on the source of Python's library.

    atoll launch --on local -n 4 examples/run.toml -- python examples/train.py

The run and the island's name come from environment variables. The script holds no run
settings, so the same script runs on every engine.
"""

import inspect
import json.decoder
import subprocess
import tarfile
import textwrap

import torch
from torch.nn import functional

import atoll.torch

CONTEXT, BATCH_SIZE, WIDTH = 32, 16, 64
SOURCES = [tarfile, subprocess, textwrap, json.decoder]


class TinyGPT(torch.nn.Module):
    """A one-layer transformer that predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = torch.nn.Embedding(128, WIDTH)
        self.position_embedding = torch.nn.Embedding(CONTEXT, WIDTH)
        self.block = torch.nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=2 * WIDTH, dropout=0.0, batch_first=True
        )
        self.head = torch.nn.Linear(WIDTH, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next character at every position."""
        positions = torch.arange(CONTEXT)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.block(hidden, src_mask=mask, is_causal=True))


def read_text() -> torch.Tensor:
    """Return the training text as a tensor of ASCII codes."""
    text = "".join(map(inspect.getsource, SOURCES))
    return torch.tensor([min(ord(character), 127) for character in text])


def train(model: torch.nn.Module, text: torch.Tensor) -> None:
    """Train until the run ends; each island samples with its own seed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with atoll.torch.join(model, optimizer) as island:
        generator = torch.Generator().manual_seed(island.seed)
        while True:
            high = len(text) - CONTEXT
            starts = torch.randint(high, (BATCH_SIZE, 1), generator=generator)
            batch = text[starts + torch.arange(CONTEXT + 1)]
            inputs, targets = batch[:, :-1], batch[:, 1:]
            logits = model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            island.report(tokens=targets.numel(), loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if island.inner_steps % 100 == 0:
                print(f"step {island.inner_steps}, loss {loss.item():.3f}", flush=True)
    print(f"{island.name}: round {island.round}, digest {island.digest}")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(TinyGPT(), read_text())
