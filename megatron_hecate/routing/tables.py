"""Static tables of the kernels (``kernels/gate.cuh``): int32 arrays, concatenated in one buffer.

Letters in shapes: E experts, R ranks, P physical experts of a rank, N sources, K nodes, C holders.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron_hecate.plan import EMPTY, Placement, World


class GroupShape:
    """Constant sizes and topology of a layer's group.

    Args:
        world: node of every rank.
        placement: any placement of the layer; all have equal sizes.
        source_rank: [N] the rank of each source's tokens; by default source n is rank n. With
            expert tensor parallelism several sources share a rank.
    """

    def __init__(
        self, world: World, placement: Placement, source_rank: Sequence[int] | None = None
    ) -> None:
        self.world = world
        self.num_experts = placement.num_experts
        self.slots_per_rank = placement.slots_per_rank
        self.source_rank = range(world.num_ranks) if source_rank is None else source_rank
        # Number of physical experts (R * P), an upper bound for the number of holders.
        self.num_physical = placement.table.size

    @cached_property
    def by_node(self) -> np.ndarray:
        """[R] int64 ranks, sorted by node, then number."""
        return np.argsort(self.world.node_index, kind="stable")

    @cached_property
    def place(self) -> np.ndarray:
        """[R] int64 index of each rank in `by_node`."""
        return np.argsort(self.by_node)

    @cached_property
    def order(self) -> np.ndarray:
        """[N] int64 sources, sorted by node, then rank."""
        return np.argsort(self.place[np.asarray(self.source_rank, np.int64)], kind="stable")

    def table(self) -> np.ndarray:
        """Serialize the group in the layout of `group_at`."""
        world = self.world
        sources = np.bincount(np.asarray(self.source_rank, np.int64), minlength=world.num_ranks)
        sources = sources[self.by_node]
        in_node = np.bincount(world.node_index)
        sizes = [
            self.num_experts,
            world.num_ranks,
            self.slots_per_rank,
            len(self.source_rank),
            world.num_nodes,
        ]
        first = _running(in_node)
        bounds = [bound[world.node_index[self.by_node]] for bound in (first[:-1], first[1:])]
        parts = [sizes, world.node_index, self.place, _running(sources), first, *bounds, self.order]
        return np.concatenate(parts).astype(np.int32)

    def work_size(self, threads: int) -> int:
        """Compute the size of the kernel's working arrays with 64-bit counts, in int64 numbers.

        It must match `work_at` in ``kernels/quotas.cuh``.
        """
        return threads + self._sets + self._token_numbers

    def shared_bytes(self, threads: int) -> int:
        """Compute the shared memory of tables and working arrays with 32-bit counts, in bytes."""
        tables = (len(self.table()) + 1) // 2 + self.holders_size // 2
        return 8 * (tables + threads + self._sets + (self._token_numbers + 1) // 2)

    @property
    def _token_numbers(self) -> int:
        """Number of token counts in the working arrays."""
        counted = (
            3 * self.num_physical
            + 3 * self.world.num_ranks
            + 3 * (self.num_experts + self.num_physical)
        )
        return self.world.num_nodes * self.num_experts + counted

    @property
    def words(self) -> int:
        """64-bit words of a set of ranks."""
        return (self.world.num_ranks + 63) // 64

    @property
    def _sets(self) -> int:
        """64-bit words of all sets in the working arrays."""
        return (2 * self.world.num_ranks + 2) * self.words

    @property
    def holders_size(self) -> int:
        """Size of a placement's table, in int32 numbers."""
        return self.sets_begin + 2 * self.num_experts * self.words

    @property
    def sets_begin(self) -> int:
        """Offset of the sets of holding ranks in that table, in int32; aligned to 8 bytes."""
        return (2 + self.num_experts + 10 * self.num_physical + 1) // 2 * 2

    @cached_property
    def parts_size(self) -> int:
        """Size of one source's `Parts`, in int32 numbers."""
        return 2 * self.num_physical + self.num_experts + 1

    @cached_property
    def exchange_sizes(self) -> tuple[int, ...]:
        """Sizes of the arrays of an `Exchange`, in order, in int64 numbers.

        They must match `exchange_at` in ``kernels/sources.cuh``.
        """
        sources = len(self.source_rank)
        slots = self.slots_per_rank
        return sources * slots, slots, sources, self.world.num_ranks, 1


class HolderOrder:
    """Holders of one placement, sorted by expert, then node, then rank.

    Attributes:
        expert: [C] expert of each holder.
        rank: [C] rank of each holder.
        physical: [C] physical expert of each holder, ``rank * P + slot``.
    """

    def __init__(self, placement: Placement, shape: GroupShape) -> None:
        rank, slot = np.nonzero(placement.table != EMPTY)
        expert = placement.table[rank, slot]
        sorted_by = np.lexsort((rank, shape.world.node_index[rank], expert))
        self._shape = shape
        self.expert = expert[sorted_by]
        self.rank = rank[sorted_by]
        self.physical = (rank * placement.slots_per_rank + slot)[sorted_by]

    def table(self) -> np.ndarray:
        """Serialize the holders in the layout of `holders_at`."""
        shape = self._shape
        num_physical = shape.num_physical
        count = np.bincount(self.expert, minlength=shape.num_experts)
        holder_index = np.full(num_physical, -1)
        holder_index[self.physical] = np.arange(len(self.physical))
        is_shared = (holder_index >= 0) & (count[self.expert[holder_index]] > 1)
        by_rank = is_shared.reshape(-1, shape.slots_per_rank)
        # Each rank's entries of shared experts (several holders) are first, in order; ranks are
        # sorted by node.
        first = np.argsort(~by_rank, axis=1, kind="stable")
        shared_held = np.take_along_axis(
            np.where(is_shared, holder_index, -1).reshape(by_rank.shape), first, axis=1
        )[shape.by_node]
        # number of (expert, node), ascending over the holders
        stretch = self.expert * shape.world.num_nodes + shape.world.node_index[self.rank]
        begin, end = (np.searchsorted(stretch, stretch, side=side) for side in ("left", "right"))
        (entries,) = np.nonzero(shared_held.ravel() >= 0)
        entry_holders = shared_held.ravel()[entries]
        entry, entry_expert, entry_stretch = (np.full(num_physical, -1) for _ in range(3))
        entry[entry_holders] = entries
        entry_expert[entries] = self.expert[entry_holders]
        entry_stretch[entries] = begin[entry_holders]
        parts = [[by_rank.sum(axis=1).max()], _running(count)]
        parts += [_padded(part, num_physical) for part in (self.expert, self.rank, self.physical)]
        parts += [
            holder_index,
            *(_padded(part, num_physical) for part in (begin, end, shape.place[self.rank])),
        ]
        parts += [entry, entry_expert, entry_stretch]
        table = np.zeros(shape.holders_size, np.int32)
        numbers = np.concatenate(parts)
        table[: len(numbers)] = numbers
        holds = np.zeros((shape.num_experts, 64 * shape.words), bool)
        holds[self.expert, shape.place[self.rank]] = True
        table[shape.sets_begin :] = np.packbits(holds, bitorder="little").view("<i4")
        return table


def _running(sizes: np.ndarray) -> np.ndarray:
    """Compute the offsets [n + 1] of consecutive ranges with ``sizes`` [n]."""
    return np.concatenate([[0], np.cumsum(sizes)])


def _padded(numbers: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([numbers, np.zeros(size - len(numbers), np.int64)])
