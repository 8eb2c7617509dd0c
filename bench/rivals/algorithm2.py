"""Algorithm 2 of the Hecate paper (arXiv 2502.02581), heterogeneous sharding, as printed.

It is not a planner of one layer; `bench/homes.py` compares it.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan import EMPTY, Placement, World


def algorithm2(loads: np.ndarray, world: World, *, overlap_degree: int) -> np.ndarray:
    """Assign every expert of all layers to a rank.

    Every rank owns L * E / R experts, any number of them in a layer. The ``overlap_degree`` hottest
    experts of each layer count as overloaded: they get replicas independent of their home, and are
    placed last, into the remaining room. All other experts are placed first, layer by layer. Layers
    are ordered by their largest load of such an expert, experts of a layer by load, descending. An
    expert is placed on the least loaded node, and there on the least loaded rank; among equals, the
    one with less room.

    The paper leaves some cases open. Decided here: load is the load of the expert's own layer; a
    node's load is its ranks' mean; if no rank of a node has room, the next node is used; overloaded
    experts are placed by load, by the same rule; the lowest index wins the remaining ties.

    Args:
        loads: tokens per layer and expert, [L, E].
        world: node of every rank.
        overlap_degree: number of overloaded experts per layer.

    Returns:
        Owner rank of each expert, [L, E].

    Raises:
        ValueError: if homes cannot be shared evenly.
    """
    num_layers, num_experts = loads.shape
    room, odd = np.divmod(num_layers * num_experts, world.num_ranks)
    if odd:
        raise ValueError(
            f"{num_layers} x {num_experts} experts are not divisible by {world.num_ranks} ranks"
        )
    free = np.full(world.num_ranks, room)
    node = world.node_index
    home = np.full(loads.shape, EMPTY)
    placed = np.zeros((num_layers, world.num_ranks))
    ranked = np.argsort(-loads, axis=1, kind="stable")
    cold = ranked[:, overlap_degree:]
    hot = ranked[:, :overlap_degree]
    largest = loads[np.arange(num_layers), cold[:, 0]] if cold.size else np.zeros(num_layers)
    layers = np.argsort(-largest, kind="stable").tolist()
    # Hot experts last: replicas balance their load independent of the home.
    queue: list[tuple[int, int]] = []
    for part in (cold, hot):
        for layer in layers:
            queue += [(layer, int(expert)) for expert in part[layer]]
    for layer, expert in queue:
        by_node = np.bincount(node, weights=placed[layer]) / np.bincount(node)
        ranks = [r for r in range(world.num_ranks) if free[r]]
        rooms = np.bincount(node, weights=free)
        chosen = min(
            ranks,
            key=lambda r: (by_node[node[r]], rooms[node[r]], node[r], placed[layer, r], free[r], r),
        )
        home[layer, expert] = chosen
        placed[layer, chosen] += loads[layer, expert]
        free[chosen] -= 1
    return home


def with_homes(home: np.ndarray, num_ranks: int, *, num_slots: int) -> Placement:
    """Build a placement from the homes of one layer.

    Args:
        home: home rank of each expert, [E]; ranks may own different numbers of experts.
        num_ranks: number of ranks, R.
        num_slots: slots for replicas on the rank with most experts; other ranks have more.
    """
    count = np.bincount(home, minlength=num_ranks)
    table = np.full((num_ranks, int(count.max()) + num_slots), EMPTY)
    for rank in range(num_ranks):
        table[rank, : count[rank]] = np.flatnonzero(home == rank)
    return Placement(home=home, table=table)
