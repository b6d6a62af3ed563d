"""A language model of a few thousand weights, its rows, and probes of a training."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched, whatever the model

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from atoll import kernels
from tests.torch.runs import bits

kernels.use("numpy")  # starts at once

WORDS, CONTEXT = 32, 8


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """Return a model, always with the same weights for a seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def rows(count: int = 64) -> list[dict[str, torch.Tensor]]:
    """Return rows that are all different: each begins with its own number."""
    numbers = torch.Generator().manual_seed(1)
    words = torch.randint(1, WORDS, (count, CONTEXT), generator=numbers)
    words[:, 0] = torch.arange(count) % WORDS
    return [{"input_ids": each, "labels": each} for each in words]


def weights(model: torch.nn.Module) -> dict[str, bytes]:
    """Return the very bytes of a model's parameters."""
    return {name: bits(value) for name, value in model.named_parameters()}


def numbers(value: bytes) -> torch.Tensor:
    """Return what the bytes of a parameter stand for."""
    return torch.frombuffer(bytearray(value), dtype=torch.float32)


def anchor_bytes(island: Any) -> dict[str, bytes]:
    """Return the very bytes of an island's anchor."""
    return {name: bits(value) for name, value in island.anchor().items()}


class Probe(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Calls functions at events of a trainer; each is given state and model."""

    def __init__(self, **functions: Any) -> None:
        self._functions = functions

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        function = self._functions.get(name)

        def event(args: Any, state: Any, control: Any, **given: Any) -> None:
            if function:
                function(state, control, given["model"])

        return event
