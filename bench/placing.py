"""Draw random placements, or fill slots greedily, for benchmarks of kernels; needs numpy only."""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan import Placement


def random_placement(rng: np.random.Generator, homes: Placement, slots: int) -> Placement:
    """Add ``slots`` replicas of random experts of other ranks to each rank of ``homes``."""
    replicas = []
    for rank in range(homes.num_ranks):
        away = np.flatnonzero(homes.home != rank)
        replicas += [(int(expert), rank) for expert in rng.choice(away, size=slots, replace=False)]
    return homes.with_replicas(replicas)


def greedy_placement(load: np.ndarray, homes: Placement, slots: int) -> Placement:
    """Fill all slots of ``homes`` greedily.

    Each replica is of the expert with the most tokens per holder, on the least loaded rank with a
    free slot.

    Args:
        load: tokens of each expert, [E].
        homes: placement without replicas.
        slots: slots per rank.
    """
    holders: list[list[int]] = [[int(rank)] for rank in homes.home]
    free = np.full(homes.num_ranks, slots)
    replicas = []
    while free.any():
        share = np.array([load[expert] / len(ranks) for expert, ranks in enumerate(holders)])
        computes = np.zeros(homes.num_ranks)
        for expert, ranks in enumerate(holders):
            computes[ranks] += share[expert]
        # The most loaded expert that some rank with a free slot does not hold.
        for expert in np.argsort(-share, kind="stable"):
            ranks = np.setdiff1d(np.flatnonzero(free), holders[expert])
            if len(ranks):
                break
        else:
            break
        rank = int(ranks[np.argmin(computes[ranks])])
        holders[expert].append(rank)
        free[rank] -= 1
        replicas.append((int(expert), rank))
    return homes.with_replicas(replicas)
