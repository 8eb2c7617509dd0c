"""Quotas: how many of each source's tokens go to each holder, from the true loads.

Two steps, both exact. (1) How much of each expert every holder serves: start from the most local choice, then move
tokens along chains of shared experts until the largest rank load cannot fall any more (to the token). (2) Which
source's tokens those are: own rank first, then own node, then the rest; given step 1, no other choice sends fewer
tokens across nodes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.world import World


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
        return np.bincount(self.rank, weights=self.tokens.sum(axis=0), minlength=num_ranks).astype(np.int64)


def split_quotas(
    load: np.ndarray, placement: Placement, world: World, *, source_rank: Sequence[int] | None = None
) -> Quotas:
    """Give every token a holder so that the largest rank load is as small as it can be.

    Args:
        load: [N, E] int, tokens of source n routed to expert e.
        placement: who holds what.
        world: node of every rank.
        source_rank: [N] the rank a source's tokens start on; ``None`` means source n is rank n. (With expert tensor
            parallelism several sources share one rank of the FSSDP group.)

    Returns:
        Quotas whose largest rank load is minimal for this placement.

    Raises:
        ValueError: for loads of the wrong shape, negative or not integral, and for sources or a world that do not fit
            the placement's ranks.
    """
    load = np.asarray(load)
    num_ranks = placement.num_ranks
    source = np.arange(num_ranks) if source_rank is None else np.asarray(source_rank)
    if load.shape != (len(source), placement.num_experts):
        raise ValueError(f"load has shape {load.shape}, expected [{len(source)}, {placement.num_experts}]")
    if not np.issubdtype(load.dtype, np.integer) or (load < 0).any():
        raise ValueError(f"load must be integers >= 0, got dtype {load.dtype} and minimum {load.min()}")
    if not ((source >= 0) & (source < num_ranks)).all():
        raise ValueError(f"source_rank must name ranks 0 to {num_ranks - 1}, got {source.tolist()}")
    if world.num_ranks != num_ranks:
        raise ValueError(f"world has {world.num_ranks} ranks, the placement {num_ranks}")
    load = load.astype(np.int64)  # sums of narrow or unsigned counts stay exact
    node = np.asarray(world.node)
    expert, rank = np.nonzero(placement.holders)
    tokens = np.zeros((len(source), len(expert)), dtype=np.int64)
    shared = placement.holders.sum(axis=1) > 1
    single = ~shared[expert]
    tokens[:, single] = load[:, expert[single]]
    if shared.any():
        served = _most_local(load, placement, source=source, node=node)
        _balance(served, placement.holders, shared)
        for e in np.flatnonzero(shared):
            columns = np.flatnonzero(expert == e)
            tokens[:, columns] = _assign_sources(
                load[:, e], served[e, rank[columns]], source=source, holder=rank[columns], node=node
            )
    return Quotas(expert=expert, rank=rank, tokens=tokens)


def _most_local(load: np.ndarray, placement: Placement, *, source: np.ndarray, node: np.ndarray) -> np.ndarray:
    """[E, R] tokens served if every source takes the nearest holder: itself, one on its node (home first), the home."""
    served = np.zeros((placement.num_experts, placement.num_ranks), dtype=np.int64)
    served[np.arange(placement.num_experts), placement.home] = load.sum(axis=0)
    for e in np.flatnonzero(placement.holders.sum(axis=1) > 1).tolist():
        holds, home = placement.holders[e], int(placement.home[e])
        served[e] = 0
        holders = [home, *(r for r in np.flatnonzero(holds).tolist() if r != home)]
        for n, r in enumerate(source.tolist()):
            if holds[r]:
                nearest = r
            else:
                nearest = next((h for h in holders if node[h] == node[r]), home)
            served[e, nearest] += load[n, e]
    return served


def _balance(served: np.ndarray, holders: np.ndarray, shared: np.ndarray) -> None:
    """Move tokens between holders, in place, until the largest rank load is minimal.

    From the most loaded rank, search the ranks that tokens can reach through shared experts (a rank reaches another if
    it serves tokens of an expert the other holds too), and push tokens along the path to the least loaded of them.
    When even the best reachable rank is at most one token below the maximum, the reached set is closed: none of its
    tokens can leave, their average is above ``max - 1``, so no placement of tokens has a smaller maximum.
    """
    load = served.sum(axis=0)
    experts = np.flatnonzero(shared)
    target = -(-int(load.sum()) // len(load))
    while True:
        start = int(load.argmax())
        if load[start] <= target:
            return
        parent = _reach(start, served, holders, experts)
        reached = [r for r in parent if r != start]
        if not reached:
            return
        end = min(reached, key=lambda r: (load[r], r))
        if load[start] - load[end] <= 1:
            return
        amount = (load[start] - load[end]) // 2
        if load[end] < target:
            amount = min(load[start] - target, target - load[end])
        path = [end]
        while path[-1] != start:
            path.append(parent[path[-1]])
        path.reverse()
        hops = list(pairwise(path))
        amount = min(amount, *(served[experts[holders[experts, b]], a].sum() for a, b in hops))
        for a, b in hops:
            left = amount
            for e in experts[holders[experts, b]].tolist():
                moved = min(left, served[e, a])
                served[e, a] -= moved
                served[e, b] += moved
                left -= moved
                if not left:
                    break
        load[start] -= amount
        load[end] += amount


def _reach(start: int, served: np.ndarray, holders: np.ndarray, experts: np.ndarray) -> dict[int, int]:
    """Breadth-first search: every rank that tokens on ``start`` can be moved to, with the rank before it on the way."""
    parent = {start: start}
    queue = deque([start])
    while queue:
        a = queue.popleft()
        movable = experts[served[experts, a] > 0]
        for b in np.flatnonzero(holders[movable].any(axis=0)).tolist():
            if b not in parent:
                parent[b] = a
                queue.append(b)
    return parent


def _assign_sources(
    supply: np.ndarray, demand: np.ndarray, *, source: np.ndarray, holder: np.ndarray, node: np.ndarray
) -> np.ndarray:
    """[N, H] split of one expert: sources' ``supply`` [N] onto holders' ``demand`` [H], the nearest first."""
    tokens = np.zeros((len(supply), len(demand)), dtype=np.int64)
    supply, demand = supply.astype(np.int64), demand.copy()
    own_rank = source[:, None] == holder[None, :]
    own_node = node[source][:, None] == node[holder][None, :]
    for near in (own_rank, own_node, np.ones_like(own_rank)):
        for n, h in zip(*np.nonzero(near), strict=True):
            moved = min(supply[n], demand[h])
            if moved:
                tokens[n, h] += moved
                supply[n] -= moved
                demand[h] -= moved
    assert not supply.any() and not demand.any(), (supply.tolist(), demand.tolist())
    return tokens
