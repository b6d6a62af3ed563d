"""A stage of a pipeline, as its rank declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from atoll.errors import UsageError


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """One stage of a pipeline: pass it to `join` instead of a model.

    Stages in the order of their index are the model: the names of all of them, each in
    its own order, must be those of the model that is not cut, in the order of that.
    A rank that holds several stages passes a list of them.
    """

    module: torch.nn.Module
    """What this rank trains of the stage: plain, in DDP, or fully_shard'ed."""

    index: int
    """Which stage this is, from 0 on."""

    of: int
    """How many stages there are."""

    names: Mapping[str, str] = field(default_factory=dict)
    """From names in the module to names in the model. A key that ends in a dot stands
    for all names that begin with it; what is not listed has the same name in both."""

    ties: Mapping[str, str] = field(default_factory=dict)
    """From names in the module to names in the model of tensors that *another* stage
    owns: the copy here is trained as that one is, and takes its values from it."""

    group: dist.ProcessGroup | None = None
    """The ranks of the whole island; None: all of torch.distributed's world."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise UsageError(
                f"Stage(index={self.index}, of={self.of}) is none of the pipeline's. "
                f"Its index is at least 0 and below {self.of}."
            )

    def model_name(self, name: str) -> str:
        """Return what the whole model calls a tensor of the module."""
        if name in self.ties:
            return self.ties[name]
        if name in self.names:
            return self.names[name]
        prefixes = [key for key in self.names if key.endswith(".")]
        for prefix in sorted(prefixes, key=len, reverse=True):
            if name.startswith(prefix):
                return self.names[prefix] + name.removeprefix(prefix)
        return name

    def require_known(self, names: set[str]) -> None:
        """Return when everything that is declared is in the module."""
        for key in (*self.names, *self.ties):
            is_prefix = key.endswith(".") and key in self.names
            if key not in names and not (
                is_prefix and any(name.startswith(key) for name in names)
            ):
                raise UsageError(
                    f"Stage {self.index} declares {key!r}, and its module has no such "
                    f"tensor. It has {', '.join(sorted(names)[:8])}."
                )
