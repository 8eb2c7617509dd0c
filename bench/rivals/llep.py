"""LLEP's spill to the least loaded (Least-Loaded Expert Parallelism, arXiv 2601.17111)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Planner, from_holders
from rivals.split import Quotas, nearest_sources

ALPHA: float = 1.1  # capacity of a rank over the mean load; default of the public repository
THRESHOLD: float = 1.3  # max / mean rank load up to which it stays with plain expert parallelism; its README's setting
PIECE: int = 1024  # fewest tokens worth a GEMM of their own; its default


class LLEP(Planner):
    """After the gate, what exceeds a rank's capacity is spilled in pieces to the least loaded ranks, weights and all.

    Experts in order of load; a home keeps what fits under alpha x mean beside its experts still to come. The rest goes
    to the rank of least load (assigned, and still to come from its own experts), as much as fits there, then to the
    next; pieces below the minimum are not made unless they are all that is left. What nobody has room for goes to the
    least loaded rank. Decided here: the pieces of an expert take tokens of near sources first, and the minimum counts
    real tokens, whatever a count of the trace stands for.

    Ignores the slots: as many copies as pieces.
    """

    name, when, lifetime = "llep", "gate", "microbatch"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        return self.setting.homes

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        self._served = _spill(load.sum(axis=0), placement.home, self.setting.num_ranks, self._piece)
        holders = placement.holders | (self._served > 0)
        return (
            placement
            if (holders == placement.holders).all()
            else from_holders(holders, placement.home)
        )

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return nearest_sources(load, self._served, self.setting.world, holders=placement.holders)

    @property
    def _piece(self) -> int:
        return max(1, round(PIECE / self.setting.tokens_per_count))


def _spill(total: np.ndarray, home: np.ndarray, num_ranks: int, piece: int) -> np.ndarray:
    """[E, R] tokens that each rank serves; ``total``: [E] tokens, ``piece``: fewest that may be moved at once."""
    served = np.zeros((len(total), num_ranks), dtype=np.int64)
    pending = np.bincount(home, weights=total, minlength=num_ranks).astype(
        np.int64
    )  # own experts still to come
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
            rank = int(takes[load[takes].argmin()]) if len(takes) else int(load.argmin())
            size = min(left, int(room[rank])) if len(takes) else left
            served[e, rank] += size
            assigned[rank] += size
            left -= size
        if left:  # a group of one rank
            served[e, own] += left
    return served
