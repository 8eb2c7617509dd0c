"""Exact cloning inside the node, per microbatch: the scheme of NVIDIA's ECHO, MoonEP and UltraEP (arXiv 2606.04101)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement
from rivals.planner import Planner


class CloneInNode(Planner):
    """After the gate, clone hot experts of loaded ranks onto the least loaded ranks of the same node; exact quotas.

    All copies are late. Greedy: from the most loaded rank of the node, the expert that can shed most tokens to
    the least loaded rank with a free slot, at most down or up to the mean; until the node is level or nothing
    helps. Decided here: quotas are ours over the clones (the systems differ in theirs), and a
    clone must take at least one in a hundred of the mean rank load.
    """

    name, when, lifetime = "clone-in-node", "gate", "microbatch"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        return self.setting.homes

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        total, node = load.sum(axis=0), np.asarray(self.setting.world.node)
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
    """(expert, rank) clones of one node. ``served``, ``holders``: [E, ranks on the node]."""
    served, holders = served.copy(), holders.copy()
    free, rank_load, mean = (
        np.full(len(ranks), slots),
        served.sum(axis=0),
        served.sum() / len(ranks),
    )
    replicas, least = [], max(1, mean / 100)
    while (free > 0).any() and rank_load.max() > mean:
        high = int(rank_load.argmax())
        best = None
        for e in np.argsort(-served[:, high], kind="stable"):
            if served[e, high] < (best[0] + 1 if best else least):
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
