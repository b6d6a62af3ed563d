"""The tokens and losses of a trainer's batches, which callbacks are not given."""

from __future__ import annotations

from typing import Any

import torch

from atoll.integrations.weighing import tokens_of


class Batches:
    """Adds up tokens and losses of the batches that one inner step is made of."""

    def __init__(self, model: torch.nn.Module, *, scale: float, is_over: bool) -> None:
        self._scale = scale
        """Of a loss that is one process's share of the mean over all tokens."""

        self._is_over = is_over
        """Whether what the trainer does is not training any more."""

        self._tokens, self._losses = 0, list[torch.Tensor]()
        self._is_share = False
        # Under torch.compile the hook would be traced as well.
        opaque = torch.compiler.disable(self._after_forward)  # type: ignore[no-untyped-call]
        self._hook = model.register_forward_hook(opaque, with_kwargs=True)

    def close(self) -> None:
        """Watch no more."""
        self._hook.remove()

    def taken(self) -> tuple[int, torch.Tensor | None]:
        """Return tokens and loss since the last call; nothing asks a device."""
        tokens, losses = self._tokens, self._losses
        self._tokens, self._losses = 0, []
        if not losses:
            return tokens, None
        total = torch.stack(losses).sum()
        return tokens, total * self._scale if self._is_share else total / len(losses)

    def _after_forward(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        if self._is_over and isinstance(output, dict) and "loss" in output:
            output["loss"] = output["loss"] * 0.0  # nor is it a loss to be told
            return
        self._tokens += tokens_of(kwargs or args)
        # With the number of all items a loss is its batch's share, else it is a mean.
        self._is_share = "num_items_in_batch" in kwargs
        loss = output.get("loss") if isinstance(output, dict) else None
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach().float())
