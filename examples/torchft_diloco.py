"""torchft's own DiLoCo, unmodified, on two islands of a run.

    pip install "atoll[torchft]"
    python examples/torchft_diloco.py

The islands are threads here, and the run lives in memory. As processes they pass the
address of a coordinator instead, which `atoll serve` prints.
"""

import threading

import torch
from torchft.local_sgd import DiLoCo

from atoll.exchange import MemoryRun
from atoll.integrations.torchft import Manager, run_settings


def train(run: MemoryRun, number: int, model: torch.nn.Sequential) -> None:
    """Train one island on numbers of its own."""
    numbers = torch.Generator().manual_seed(number)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def save() -> dict[str, object]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(run, reduces=[model], load_state_dict=load, state_dict=save)
    with manager, DiLoCo(manager, [model], inner, outer, sync_every=20):
        while True:  # the run ends it
            x = torch.rand(64, 1, generator=numbers) * 6 - 3
            inner.zero_grad()
            torch.nn.functional.mse_loss(model(x), x.sin()).backward()
            inner.step()


def main() -> None:
    """Train until the run ends, and show that both islands hold one model."""
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
        threading.Thread(target=train, args=(run, number, model))
        for number, model in enumerate(models)
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
