"""Exact cloning inside the node, per microbatch.

NVIDIA's ECHO, MoonEP and UltraEP (arXiv 2606.04101) use this scheme.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Planner


class CloneInNode(Planner):
    """Planner that clones hot experts onto the least loaded ranks of the same node after the gate.

    All copies are late, and quotas are exact. The search is greedy: on the most loaded rank of the
    node it takes the expert that can shed most tokens to the least loaded rank with a free slot, at
    most down or up to the mean, until the node is balanced or no clone helps. Decided here: quotas
    are ours over the clones (the systems' quotas differ), and a clone must take at least 1 % of the
    mean rank load.
    """

    name = "clone-in-node"
    when = "gate"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        return self.setting.homes

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        total = load.sum(axis=0)
        node = np.asarray(self.setting.world.node)
        served = np.where(placement.holders, total[:, None], 0)
        replicas: list[tuple[int, int]] = []
        for k in np.unique(node):
            ranks = np.flatnonzero(node == k)
            replicas += _clone(
                served[:, ranks], placement.holders[:, ranks], self.setting.slots, ranks
            )
        return placement.with_replicas(replicas) if replicas else placement


def _clone(
    served: np.ndarray, holders: np.ndarray, slots: int, ranks: np.ndarray
) -> list[tuple[int, int]]:
    """Choose the clones of one node.

    Args:
        served: tokens per expert and rank of the node, [E, ranks].
        holders: holders of each expert on the node, [E, ranks] bool.
        slots: slots per rank.
        ranks: ranks of the node.

    Returns:
        Expert and rank of each clone.
    """
    served = served.copy()
    holders = holders.copy()
    free = np.full(len(ranks), slots)
    rank_load = served.sum(axis=0)
    mean = served.sum() / len(ranks)
    least = max(1, mean / 100)
    replicas: list[tuple[int, int]] = []
    while (free > 0).any() and rank_load.max() > mean:
        high = int(rank_load.argmax())
        best = None
        for e in np.argsort(-served[:, high], kind="stable"):
            # Experts are in descending order: no further expert can move more tokens.
            needed = best[0] + 1 if best else least
            if served[e, high] < needed:
                break
            possible = ~holders[e] & (free > 0)
            if not possible.any():
                continue
            low = int(np.where(possible, rank_load, np.inf).argmin())
            moved = int(min(served[e, high], rank_load[high] - mean, mean - rank_load[low]))
            if moved >= least and (best is None or moved > best[0]):
                best = (moved, int(e), low)
        if best is None:
            return replicas
        moved, e, low = best
        served[e, high] -= moved
        served[e, low] += moved
        rank_load[[high, low]] += [-moved, moved]
        holders[e, low] = True
        free[low] -= 1
        replicas.append((e, int(ranks[low])))
    return replicas
