"""LLEP's spill to the least loaded (Least-Loaded Expert Parallelism, arXiv 2601.17111)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Planner, from_holders
from rivals.split import Quotas, nearest_sources

# capacity of a rank over the mean load; default of the public repository
ALPHA: float = 1.1
# max / mean rank load up to which LLEP uses plain expert parallelism; setting of its README
THRESHOLD: float = 1.3
# fewest tokens of a separate GEMM; its default
PIECE: int = 1024


class LLEP(Planner):
    """Planner that spills tokens above a rank's capacity, with weights, to the least loaded ranks.

    It plans after the gate, in order of the experts' load. A home keeps an expert's tokens up to
    alpha x mean, minus the load of its experts that are not assigned yet. The other tokens are
    given in pieces to the rank of least load (assigned, and not yet assigned of its own experts),
    up to its capacity, then to the next rank. Pieces below the minimum are made only from the last
    tokens. If no rank has room, the least loaded rank gets all remaining tokens. Decided here: the
    pieces of an expert take tokens of near sources first, and the minimum counts real tokens, not
    counts of the trace.

    The planner ignores the slots: every piece has a copy.
    """

    name = "llep"
    when = "gate"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        return self.setting.homes

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        self._served = _spill(load.sum(axis=0), placement.home, self.setting.num_ranks, self._piece)
        holders = placement.holders | (self._served > 0)
        if (holders == placement.holders).all():
            return placement
        return from_holders(holders, placement.home)

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return nearest_sources(load, self._served, self.setting.world, holders=placement.holders)

    @property
    def _piece(self) -> int:
        return max(1, round(PIECE / self.setting.tokens_per_count))


def _spill(total: np.ndarray, home: np.ndarray, num_ranks: int, piece: int) -> np.ndarray:
    """Assign the tokens of each expert to ranks.

    Args:
        total: tokens of each expert, [E].
        home: home rank of each expert, [E].
        num_ranks: number of ranks, R.
        piece: fewest tokens of a piece.

    Returns:
        Tokens of each expert that each rank computes, [E, R].
    """
    served = np.zeros((len(total), num_ranks), dtype=np.int64)
    # tokens of own experts that are not assigned yet, [R]
    pending = np.bincount(home, weights=total, minlength=num_ranks).astype(np.int64)
    # A small imbalance costs less than sending weights.
    if pending.max() <= THRESHOLD * pending.mean():
        served[np.arange(len(total)), home] = total
        return served
    capacity = max(1, int(ALPHA * pending.mean()))
    assigned = np.zeros(num_ranks, dtype=np.int64)
    for e in np.argsort(-total, kind="stable"):
        own = int(home[e])
        pending[own] -= total[e]
        served[e, own] = np.clip(capacity - assigned[own] - pending[own], 0, total[e])
        assigned[own] += served[e, own]
        left = int(total[e] - served[e, own])
        others = np.arange(num_ranks) != own
        while left and others.any():
            load = np.where(others, assigned + pending, np.iinfo(np.int64).max)
            room = capacity - load
            takes = np.flatnonzero((room > 0) & ((room >= piece) | (room >= left)))
            if len(takes):
                rank = int(takes[load[takes].argmin()])
                size = min(left, int(room[rank]))
            else:
                rank = int(load.argmin())
                size = left
            served[e, rank] += size
            assigned[rank] += size
            left -= size
        # Only in a group of one rank.
        if left:
            served[e, own] += left
    return served
