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
    def from_ranks(cls, global_ranks: Sequence[int], *, ranks_per_node: int) -> World:
        """Nodes hold ``ranks_per_node`` consecutive global ranks each, as every Megatron launcher numbers them."""
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={ranks_per_node} must be at least 1")
        return cls(node=tuple(rank // ranks_per_node for rank in global_ranks))

    @property
    def num_ranks(self) -> int:
        return len(self.node)
