"""torchft's own DiLoCo, unmodified, on two islands of a run.

    pip install ".[torchft]"
    python examples/torchft_diloco.py

Here the islands are threads and the run is in memory. If your islands are processes,
pass the coordinator's address that `atoll serve` prints instead of the `MemoryRun`.
"""

import threading

import torch
from torchft.local_sgd import DiLoCo

from atoll.exchange import MemoryRun
from atoll.integrations.torchft import Manager, run_settings


def train(run: MemoryRun, seed: int, model: torch.nn.Sequential) -> None:
    """Train one island on its own random inputs."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def save() -> dict[str, object]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(run, reduces=[model], load_state_dict=load, state_dict=save)
    with manager, DiLoCo(manager, [model], inner, outer, sync_every=20):
        while True:  # until the run ends
            x = torch.rand(64, 1, generator=generator) * 6 - 3
            inner.zero_grad()
            torch.nn.functional.mse_loss(model(x), x.sin()).backward()
            inner.step()


def main() -> None:
    """Train until the run ends; both islands print the same loss."""
    torch.manual_seed(0)
    settings = run_settings()
    run = MemoryRun(
        settings.with_values({"run.start_islands": 2, "run.end_rounds": 30})
    )
    models = [
        torch.nn.Sequential(
            torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        for _ in range(2)
    ]
    islands = [
        threading.Thread(target=train, args=(run, seed, model))
        for seed, model in enumerate(models)
    ]
    for island in islands:
        island.start()
    for island in islands:
        island.join()
    x = torch.linspace(-3, 3, 200).unsqueeze(1)
    for model in models:
        print(f"loss {torch.nn.functional.mse_loss(model(x), x.sin()).item():.2e}")


if __name__ == "__main__":
    main()
