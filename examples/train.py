"""An island that learns to write Python, from the source of Python's own library.

    atoll launch --on local -n 4 examples/run.toml -- python examples/train.py

What it joins is in its environment, and so is its name: the script has no setting of
the run, and the same one runs on every engine.
"""

import inspect
import json.decoder
import subprocess
import tarfile
import textwrap

import torch
from torch.nn import functional

import atoll.torch

CONTEXT, BATCH, WIDTH = 32, 16, 64
SOURCES = [tarfile, subprocess, textwrap, json.decoder]


class Writer(torch.nn.Module):
    """Guesses the next character from the last ones: attention, once, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(128, WIDTH)
        self.places = torch.nn.Embedding(CONTEXT, WIDTH)
        self.block = torch.nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=2 * WIDTH, dropout=0.0, batch_first=True
        )
        self.head = torch.nn.Linear(WIDTH, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return a score for every character that may follow."""
        hidden = self.letters(text) + self.places(torch.arange(CONTEXT))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.block(hidden, src_mask=mask, is_causal=True))


def read() -> torch.Tensor:
    """Return the text, as the numbers of its characters."""
    text = "".join(map(inspect.getsource, SOURCES))
    return torch.tensor([min(ord(letter), 127) for letter in text])


def train(model: torch.nn.Module, text: torch.Tensor) -> None:
    """Train until the run ends, on other places of the text than other islands."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with atoll.torch.join(model, optimizer) as island:
        chance = torch.Generator().manual_seed(island.seed)
        while True:
            starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=chance)
            rows = text[starts + torch.arange(CONTEXT + 1)]
            scores = model(rows[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            island.report(tokens=rows[:, 1:].numel(), loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if island.inner_steps % 100 == 0:
                print(f"step {island.inner_steps}, loss {loss.item():.3f}", flush=True)
    print(f"{island.name}: round {island.round}, digest {island.digest}")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Writer(), read())
