"""What a split is, and those of published systems: evenly among holders, or sources for totals already decided."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from megatron_hecate.plan import Placement, World


@dataclasses.dataclass(frozen=True, eq=False)
class Quotas:
    """Who serves what: one entry per holder of an expert.

    Args:
        expert: [C] expert of the holder.
        rank: [C] its rank. Holders are ordered by expert, then rank.
        tokens: [R, C] tokens of each rank for this expert that go to this holder; over an expert's holders they sum to
            the rank's load.
    """

    expert: np.ndarray
    rank: np.ndarray
    tokens: np.ndarray

    def rank_load(self, num_ranks: int) -> np.ndarray:
        """[R] tokens each rank computes."""
        load = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(load, self.rank, self.tokens.sum(axis=0))
        return load

    def flow(self, num_ranks: int) -> np.ndarray:
        """[R, R] tokens of rank r that rank d computes."""
        flow = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        np.add.at(flow.T, self.rank, self.tokens.T)
        return flow


def even_split(
    load: np.ndarray, placement: Placement, world: World, *, nearest: Literal["rank", "node", "any"]
) -> Quotas:
    """Every source shares its tokens for an expert evenly among the candidates.

    Args:
        load: [R, E] int, tokens of rank r for expert e.
        placement: who holds what.
        world: node of every rank.
        nearest: who is a candidate. ``any``: every holder. ``node``: the holders on the source's node, every holder if
            there is none. ``rank``: the source itself if it holds the expert, else as ``node``.

    Returns:
        Quotas. What does not divide goes one token each to candidates counted from the source's number on, so that
        low ranks are not favoured.
    """
    node, source = np.asarray(world.node), np.arange(len(load))
    expert, rank = np.nonzero(placement.holders)
    first = np.searchsorted(expert, np.arange(placement.num_experts))  # each expert's first holder
    candidate = np.ones((len(source), len(expert)), dtype=bool)
    near = {"any": [], "node": [node[source][:, None] == node[rank]]}
    near["rank"] = [*near["node"], source[:, None] == rank]
    for closer in near[nearest]:
        has = np.maximum.reduceat(closer, first, axis=1)[:, expert]
        candidate = np.where(has, closer, candidate)
    count = np.add.reduceat(candidate, first, axis=1, dtype=np.int64)[:, expert]
    before = np.cumsum(candidate, axis=1) - candidate
    position = before - before[:, first][:, expert]  # the how-manieth candidate a holder is
    share, rest = np.divmod(load.astype(np.int64)[:, expert], count)
    tokens = np.where(candidate, share + ((position - source[:, None]) % count < rest), 0)
    return Quotas(expert=expert, rank=rank, tokens=tokens)


def nearest_sources(
    load: np.ndarray, served: np.ndarray, world: World, *, holders: np.ndarray
) -> Quotas:
    """Which sources' tokens make up given totals: own rank first, then own node, then the rest.

    Args:
        load: [R, E] int, tokens of rank r for expert e.
        served: [E, R] int, tokens of expert e that rank r computes; sums to the load.
        world: node of every rank.
        holders: [E, R] bool, covers everything served.
    """
    node = np.asarray(world.node)
    expert, rank = np.nonzero(holders)
    tokens = np.zeros((len(load), len(expert)), dtype=np.int64)
    single = holders.sum(axis=1)[expert] == 1
    tokens[:, single] = load[:, expert[single]]
    for e in np.unique(expert[~single]):
        columns = np.flatnonzero(expert == e)
        supply, demand = load[:, e].astype(np.int64), served[e, rank[columns]].astype(np.int64)
        own = np.minimum(supply[rank[columns]], demand)
        tokens[rank[columns], columns] += own
        supply[rank[columns]] -= own
        demand -= own
        for k in [*np.unique(node[rank[columns]]), None]:
            near = np.ones(len(columns), dtype=bool) if k is None else node[rank[columns]] == k
            flow = _in_order(
                np.where((node == k) | (k is None), supply, 0), np.where(near, demand, 0)
            )
            tokens[:, columns] += flow
            supply -= flow.sum(axis=1)
            demand -= flow.sum(axis=0)
        assert not supply.any() and not demand.any(), f"expert {e}: served does not sum to the load"
    return Quotas(expert=expert, rank=rank, tokens=tokens)


def _in_order(supply: np.ndarray, demand: np.ndarray) -> np.ndarray:
    """[N, H] tokens when sources, one after the other, fill holders, one after the other."""
    n, h = np.cumsum(supply)[:, None], np.cumsum(demand)[None, :]
    return np.maximum(0, np.minimum(n, h) - np.maximum(n - supply[:, None], h - demand[None, :]))
