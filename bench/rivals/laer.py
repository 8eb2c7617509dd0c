"""LAER-MoE's re-layout of fully sharded experts (arXiv 2602.11686)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import Placement, World
from megatron_hecate.tools.traffic import Traffic
from rivals.copies import backwards, no_traffic
from rivals.planner import Moves, Planner, Setting, from_holders
from rivals.split import Quotas, even_split


class LAER(Planner):
    """Planner of fully sharded experts: in each step every rank restores C experts.

    It plans from the last step's load. Replicas: one per node for each expert if they fit, else
    one; further replicas for the highest load per replica, one at a time up to one per node, then
    one on every node at once. Layout: replicas by load, each to the node with fewest replicas of
    its expert, then to the least loaded rank with room. Tokens: split evenly among the holders on
    their node, else among all holders. Decided here: C = homes + slots, the memory of all planners;
    at most one replica of an expert per rank; no random perturbations of the counts; plain expert
    parallelism before the first load.

    Experts have no home, so all C experts are sent in every step, from all ranks, and their
    gradients back; ``home`` in the placements names one holder and implies no ownership.
    """

    name = "laer"
    when = "history"

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        homes = self.setting.homes
        if not history:
            return homes
        load = history[-1].sum(axis=0).astype(float)
        world = self.setting.world
        capacity = self.setting.homes_per_rank + self.setting.slots
        count = _replicas(load, world, capacity)
        return from_holders(_lay_out(load, count, self.setting), homes.home)

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        return even_split(load, placement, self.setting.world, nearest="node")

    def moves(self, placed: Placement, final: Placement) -> Moves:
        none = no_traffic(self.setting.num_ranks)
        early = gather_shards(placed.holders, self.setting.world)
        return Moves(early=early, late=none, grads=backwards(early), state=none)


def _replicas(load: np.ndarray, world: World, capacity: int) -> np.ndarray:
    """Choose the replicas of each expert, [E].

    There is at most one replica per rank, and ``num_ranks * capacity`` in total.

    Args:
        load: tokens of each expert, [E].
        world: node of every rank.
        capacity: experts per rank.
    """
    total = world.num_ranks * capacity
    num_nodes = world.num_nodes
    count = np.full(len(load), num_nodes if num_nodes * len(load) <= total else 1)
    open_ = np.ones(len(load), dtype=bool)
    while count.sum() < total and open_.any():
        e = int(np.where(open_, load / count, -1).argmax())
        # With one replica on every node, further replicas are added to all nodes at once.
        more = num_nodes if count[e] >= num_nodes else 1
        if count[e] + more > world.num_ranks or count.sum() + more > total:
            open_[e] = False
        else:
            count[e] += more
    return count


def _lay_out(load: np.ndarray, count: np.ndarray, setting: Setting) -> np.ndarray:
    """Choose the ranks that restore each expert, [E, R] bool.

    A replica is left out if all ranks with room already have one of its expert.

    Args:
        load: tokens of each expert, [E].
        count: replicas of each expert, [E].
        setting: setting of the layer.
    """
    world = setting.world
    capacity = setting.homes_per_rank + setting.slots
    node = np.unique(np.asarray(world.node), return_inverse=True)[1]
    holders = np.zeros((len(load), len(node)), dtype=bool)
    # replicas of an expert on a node
    on_node = np.zeros((len(load), world.num_nodes), dtype=int)
    rank_load = np.zeros(len(node))
    room = np.full(len(node), capacity)
    replica = np.repeat(np.arange(len(load)), count)
    weight = (load / count)[replica]
    for i in np.argsort(-weight, kind="stable").tolist():
        e = int(replica[i])
        possible = np.flatnonzero((room > 0) & ~holders[e])
        if not len(possible):
            continue
        # Nodes with fewest replicas of the expert first, so that tokens stay in their node.
        near = on_node[e, node[possible]]
        possible = possible[near == near.min()]
        rank = int(possible[rank_load[possible].argmin()])
        holders[e, rank] = True
        on_node[e, node[rank]] += 1
        rank_load[rank] += weight[i]
        room[rank] -= 1
    return holders


def gather_shards(held: np.ndarray, world: World) -> Traffic:
    """Count the traffic of sharded chunks, of which a holder receives one share from every rank.

    Args:
        held: holders of each expert, [E, R] bool.
        world: node of every rank.
    """
    node = np.asarray(world.node)
    same = (node[:, None] == node[None, :]) & ~np.eye(len(node), dtype=bool)
    other = node[:, None] != node[None, :]
    chunks = held.sum(axis=0) / len(node)
    return Traffic(
        same @ chunks, same.sum(axis=0) * chunks, other @ chunks, other.sum(axis=0) * chunks
    )
