"""Where the ranks of an FSSDP group sit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class World:
    """The ranks of one FSSDP group and the node each of them runs on.

    Args:
        node: [R] node index of each rank; ranks of one node share a fast link. Any integers, any order.

    Raises:
        ValueError: if there is no rank.
    """

    node: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.node:
            raise ValueError("an FSSDP group needs at least one rank, got node=()")

    @classmethod
    def from_names(cls, names: Sequence[str]) -> World:
        """[R] the name of the machine each rank runs on."""
        order = list(dict.fromkeys(names))
        return cls(node=tuple(order.index(name) for name in names))

    @property
    def num_ranks(self) -> int:
        return len(self.node)
