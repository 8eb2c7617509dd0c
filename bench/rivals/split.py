"""Quotas, and the splits of published systems: even among holders, or sources for given totals."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from megatron_hecate.plan import Placement, World


@dataclasses.dataclass(frozen=True, eq=False)
class Quotas:
    """Tokens of each source for each holder of an expert; holders are ordered by expert, then rank.

    Args:
        expert: expert of each holder, [C].
        rank: rank of each holder, [C].
        tokens: tokens of each source for each holder, [R, C]; over an expert's holders they sum to
            the source's load.
    """

    expert: np.ndarray
    rank: np.ndarray
    tokens: np.ndarray

    def rank_load(self, num_ranks: int) -> np.ndarray:
        """Sum the tokens that each rank computes, [R]."""
        load = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(load, self.rank, self.tokens.sum(axis=0))
        return load

    def flow(self, num_ranks: int) -> np.ndarray:
        """Sum the tokens of rank r that rank d computes, [R, R]."""
        flow = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        np.add.at(flow.T, self.rank, self.tokens.T)
        return flow


def even_split(
    load: np.ndarray, placement: Placement, world: World, *, nearest: Literal["rank", "node", "any"]
) -> Quotas:
    """Split each source's tokens for an expert evenly among the candidates.

    Remainders are given one token each to consecutive candidates, beginning at the source's number,
    so that low ranks are not favoured.

    Args:
        load: tokens of rank r for expert e, [R, E] int.
        placement: holders of each expert.
        world: node of every rank.
        nearest: candidates. ``any``: every holder. ``node``: holders on the source's node, every
            holder if there is none. ``rank``: the source if it is a holder, else as ``node``.

    Returns:
        Quotas.
    """
    node = np.asarray(world.node)
    source = np.arange(len(load))
    expert, rank = np.nonzero(placement.holders)
    # index of each expert's first holder
    first = np.searchsorted(expert, np.arange(placement.num_experts))
    candidate = np.ones((len(source), len(expert)), dtype=bool)
    near = {"any": [], "node": [node[source][:, None] == node[rank]]}
    near["rank"] = [*near["node"], source[:, None] == rank]
    for closer in near[nearest]:
        has = np.maximum.reduceat(closer, first, axis=1)[:, expert]
        candidate = np.where(has, closer, candidate)
    count = np.add.reduceat(candidate, first, axis=1, dtype=np.int64)[:, expert]
    before = np.cumsum(candidate, axis=1) - candidate
    # index of a holder among the candidates of its expert
    position = before - before[:, first][:, expert]
    share, rest = np.divmod(load.astype(np.int64)[:, expert], count)
    tokens = np.where(candidate, share + ((position - source[:, None]) % count < rest), 0)
    return Quotas(expert=expert, rank=rank, tokens=tokens)


def nearest_sources(
    load: np.ndarray, served: np.ndarray, world: World, *, holders: np.ndarray
) -> Quotas:
    """Choose the sources of given totals: the holder's rank first, then its node, then all ranks.

    Args:
        load: tokens of rank r for expert e, [R, E] int.
        served: tokens of expert e that rank r computes, [E, R] int; sums to the load.
        world: node of every rank.
        holders: holders of each expert, [E, R] bool; includes all ranks with tokens in ``served``.
    """
    node = np.asarray(world.node)
    expert, rank = np.nonzero(holders)
    tokens = np.zeros((len(load), len(expert)), dtype=np.int64)
    single = holders.sum(axis=1)[expert] == 1
    tokens[:, single] = load[:, expert[single]]
    for e in np.unique(expert[~single]):
        columns = np.flatnonzero(expert == e)
        supply = load[:, e].astype(np.int64)
        demand = served[e, rank[columns]].astype(np.int64)
        own = np.minimum(supply[rank[columns]], demand)
        tokens[rank[columns], columns] += own
        supply[rank[columns]] -= own
        demand -= own
        # Node by node, then all nodes.
        for k in [*np.unique(node[rank[columns]]), None]:
            if k is None:
                flow = _in_order(supply, demand)
            else:
                on_node = node[rank[columns]] == k
                flow = _in_order(np.where(node == k, supply, 0), np.where(on_node, demand, 0))
            tokens[:, columns] += flow
            supply -= flow.sum(axis=1)
            demand -= flow.sum(axis=0)
        assert not supply.any() and not demand.any(), f"expert {e}: served does not sum to the load"
    return Quotas(expert=expert, rank=rank, tokens=tokens)


def _in_order(supply: np.ndarray, demand: np.ndarray) -> np.ndarray:
    """Fill holders in order from sources in order; returns tokens [N, H]."""
    source_end = np.cumsum(supply)[:, None]
    holder_end = np.cumsum(demand)[None, :]
    begin = np.maximum(source_end - supply[:, None], holder_end - demand[None, :])
    return np.maximum(0, np.minimum(source_end, holder_end) - begin)
