"""What one island gives to another: the state of the training, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.errors import CorruptError
from atoll.integrations.torchft.trees import pack_tree, unpack_tree
from atoll.integrations.torchft.wants import Served


@dataclass(frozen=True)
class GivenState:
    """All that an island needs to go on where another is."""

    registered: dict[str, Any]
    """What torchft and its user have registered, by key."""

    step: int
    batches_committed: int
    rounds: list[int]
    """Of each fragment, the last round that is in the weights."""

    served: Served

    def packed(self) -> bytes:
        """Return the state as bytes.

        Raises:
            UsageError: something that is registered cannot be carried.
        """
        return pack_tree(
            {
                "user": self.registered,
                "step": self.step,
                "batches_committed": self.batches_committed,
                "rounds": self.rounds,
                "served": {name: list(want) for name, want in self.served.items()},
            }
        )

    @classmethod
    def of(cls, data: bytes, *, num_fragments: int) -> GivenState:
        """Return the state that another island has packed.

        Raises:
            CorruptError: the bytes hold none, or one of another number of fragments.
        """
        tree = unpack_tree(data)
        try:
            given = cls(
                registered=dict(tree["user"]),
                step=int(tree["step"]),
                batches_committed=int(tree["batches_committed"]),
                rounds=[int(round) for round in tree["rounds"]],
                served={
                    str(name): (want[0], want[1])
                    for name, want in tree["served"].items()
                },
            )
            if len(given.rounds) != num_fragments:
                raise ValueError(f"{len(given.rounds)} rounds for {num_fragments}")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
            raise CorruptError(
                f"The state that another island gave lacks what belongs to it: {exc!r}."
                " Start both islands with the same release."
            ) from exc
        return given
