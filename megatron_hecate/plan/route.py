"""Quotas: how many of each source's tokens go to each holder, from the true loads.

Exact, in three steps. (1) The smallest possible largest rank load, to the token (`flow.level`). (2) Of all splits that
reach it, the one with fewest tokens across nodes, then fewest to another rank (`nearest.bring_below`). (3) Which
source's tokens those are: own rank first, then own node, then the rest (`assign.assign`). Where there are many guests,
(2) is tried for an even split, and (1) only made when there is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan.assign import assign
from megatron_hecate.plan.compiled import compiled
from megatron_hecate.plan.flow import NO_LIMIT, level
from megatron_hecate.plan.graph import Graph, columns, unpack
from megatron_hecate.plan.nearest import bring_below
from megatron_hecate.plan.origin import Origin, origins, start
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.world import World

ROUNDS: int = 3  # of `flow.level` for tokens that can move for nothing, before prices are looked at
EVEN: int = 64  # up to so many ranks, with twice as many guests, nearly all loads can be split evenly


@dataclasses.dataclass(frozen=True, eq=False)
class Quotas:
    """Who serves what: one column per (expert, holder) pair.

    Args:
        expert: [C] expert of the column.
        rank: [C] the holder. Columns are ordered by expert, then rank.
        tokens: [N, C] tokens of source n for this expert that go to this holder; over an expert's columns they sum
            to the source's load.
    """

    expert: np.ndarray
    rank: np.ndarray
    tokens: np.ndarray

    def rank_load(self, num_ranks: int) -> np.ndarray:
        """[R] tokens each rank computes."""
        load = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(load, self.rank, self.tokens.sum(axis=0))
        return load

    def dense(self, num_experts: int, num_ranks: int) -> np.ndarray:
        """[N, E, R] the same as a table."""
        table = np.zeros((len(self.tokens), num_experts, num_ranks), dtype=self.tokens.dtype)
        table[:, self.expert, self.rank] = self.tokens
        return table


def split_quotas(
    load: np.ndarray,
    placement: Placement,
    world: World,
    *,
    source_rank: Sequence[int] | None = None,
    only: int | None = None,
) -> Quotas:
    """Give every token a holder so that the largest rank load is as small as it can be, and as near as that allows.

    Args:
        load: [N, E] int, tokens of source n routed to expert e.
        placement: who holds what.
        world: node of every rank.
        source_rank: [N] the rank a source's tokens start on; ``None`` means source n is rank n. (With expert tensor
            parallelism several sources share one rank of the FSSDP group.)
        only: the one source whose row is wanted; ``tokens`` is then [1, C].

    Returns:
        Quotas, int64, whose largest rank load is minimal for this placement, and among those the tokens across nodes,
        and then the tokens across ranks of a node.

    Raises:
        ValueError: for loads of the wrong shape, negative or not integral, and for sources or a world that do not fit
            the placement's ranks.
    """
    load, source = _checked(load, placement, world, source_rank)
    if only is not None and not 0 <= only < len(source):
        raise ValueError(f"only={only} names no source; there are {len(source)}")
    graph = placement.graph(world)
    expert, rank = columns(graph)
    tokens = np.zeros((len(source) if only is None else 1, len(rank)), dtype=np.int64)
    if _split(load, source, graph, -1 if only is None else only, tokens):
        raise ValueError(f"load must be integers >= 0, got dtype {load.dtype} and minimum {load.min()}")
    return Quotas(expert=expert, rank=rank, tokens=tokens)


def largest_load(total: np.ndarray, placement: Placement, world: World) -> int:
    """The smallest possible largest rank load when [E] ``total`` tokens are split over the holders.

    Raises:
        ValueError: for loads of the wrong length, negative or not integral, and a world that does not fit.
    """
    return _largest(checked_total(total, placement, world), placement.graph(world))


def checked_total(total: np.ndarray, placement: Placement, world: World) -> np.ndarray:
    """[E] ``total`` as int64.

    Raises:
        ValueError: as `largest_load`.
    """
    total = np.asarray(total)
    if total.shape != placement.home.shape:
        raise ValueError(f"total has shape {total.shape}, expected [{placement.num_experts}]")
    if total.dtype.kind not in "iu" or total.min() < 0:
        raise ValueError(f"total must be integers >= 0, got dtype {total.dtype} and minimum {total.min()}")
    if world.num_ranks != placement.num_ranks:
        raise ValueError(f"world has {world.num_ranks} ranks, the placement {placement.num_ranks}")
    return np.ascontiguousarray(total, dtype=np.int64)


@compiled
def _largest(total: np.ndarray, packed: np.ndarray) -> int:
    graph = unpack(packed)
    load = np.zeros(len(graph.node), np.int64)
    served = np.zeros(len(graph.table), np.int64)
    for e in range(len(total)):  # a fair start: even shares
        part = total[e] // graph.count[e]
        for k in range(graph.count[e]):
            c = graph.where[e, k]
            served[c] = part if k else total[e] - part * (graph.count[e] - 1)
            load[graph.rank_of[c]] += served[c]
    return _level(graph, served, load, 0, NO_LIMIT, NO_LIMIT, False)


@compiled
def _level(
    graph: Graph, served: np.ndarray, load: np.ndarray, enough: int, most: int, rounds: int, patient: bool
) -> int:
    """`flow.level` without tokens that must stay."""
    least = np.zeros(len(graph.count), np.int64)
    visited = np.empty(len(load), np.bool_)
    return level(graph.links, graph.table, served, load, least, enough, most, visited, rounds, patient)


@compiled
def _split(load: np.ndarray, source: np.ndarray, packed: np.ndarray, row: int, tokens: np.ndarray) -> bool:
    """Write ``tokens`` as `assign` does; whether a load is negative (then nothing is written)."""
    graph = unpack(packed)
    everyone, before, negative = origins(load, source, graph, row)
    if negative:
        return True
    served = _served(everyone, graph)
    assign(load, source, graph, served, everyone, before, row, tokens)
    return False


@compiled
def _served(origin: Origin, graph: Graph) -> np.ndarray:
    """[R * P] tokens each slot serves."""
    fixed, movable, load = start(origin, graph)
    # most of what must move can do so for nothing, and finds its way sooner when prices are not looked at
    lowest = -(-load.sum() // len(load))
    if _level(graph, movable, load, lowest, lowest, ROUNDS, True) == lowest:
        return fixed + movable
    num_slots, num_guests = len(fixed), len(graph.links.slot) - (len(graph.links.begin) - 1)
    flow = np.zeros(num_slots + len(graph.group_begin), np.int64)
    for c in range(num_slots):
        flow[c] = fixed[c] + movable[c]
        if graph.group_of[c] >= 0:
            flow[num_slots + graph.group_of[c]] += flow[c]
    # as good as known: the optimum is the mean
    if len(load) <= EVEN and num_guests >= 2 * len(load):
        its_flow, its_load = flow.copy(), load.copy()
        if bring_below(lowest, graph, origin, its_flow, its_load):
            return its_flow[:num_slots]
    served, its_load = flow[:num_slots].copy(), load.copy()
    cap = _level(graph, served, its_load, lowest, NO_LIMIT, NO_LIMIT, False)
    reached = bring_below(cap, graph, origin, flow, load)
    assert reached
    return flow[:num_slots]


def _checked(
    load: np.ndarray, placement: Placement, world: World, source_rank: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Loads [N, E] as int64 or int32, and source ranks [N] as int64; negative loads are seen when they are read."""
    load = np.asarray(load)
    num_ranks = placement.num_ranks
    source = np.arange(num_ranks) if source_rank is None else np.asarray(source_rank, dtype=np.int64)
    if load.shape != (len(source), placement.num_experts):
        raise ValueError(f"load has shape {load.shape}, expected [{len(source)}, {placement.num_experts}]")
    if load.dtype.kind not in "iu":
        raise ValueError(f"load must be integers >= 0, got dtype {load.dtype} and minimum {load.min()}")
    if source_rank is not None and len(source) and not (source.min() >= 0 and source.max() < num_ranks):
        raise ValueError(f"source_rank must name ranks 0 to {num_ranks - 1}, got {source.tolist()}")
    if world.num_ranks != num_ranks:
        raise ValueError(f"world has {world.num_ranks} ranks, the placement {num_ranks}")
    # sums are exact in int64; at a thousand ranks int32, which layers gather, is read in half the time
    return np.ascontiguousarray(load, dtype=np.int32 if load.dtype == np.int32 else np.int64), source
