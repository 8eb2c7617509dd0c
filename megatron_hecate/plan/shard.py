"""Where experts live: heterogeneous homes. Algorithm 2 of the Hecate paper (arXiv 2502.02581), chosen rarely.

A rank may be home to any number of a layer's experts as long as all ranks own equally many over all layers of the
pipeline stage: optimizer state stays even, and a layer gets more freedom to be balanced. L = 2 layers, E = 4 experts,
R = 2 ranks, 4 homes each::

                 tokens           rank 0         rank 1
    layer 0    9  1  1  1       [ 0       ]    [ 1  2  3 ]
    layer 1    5  4  2  1       [ 1  2  3 ]    [ 0       ]

The t hottest experts of a layer are copied every iteration wherever they live; the others, the *cold* ones, decide how
much imbalance the homes leave for guests to remove.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from megatron_hecate.plan.placement import EMPTY, Placement
from megatron_hecate.plan.world import World


def plan_homes(
    loads: np.ndarray, world: World, *, overlap_degree: int, order: Literal["loads", "layers"] = "loads"
) -> np.ndarray:
    """Choose the home of every expert of a pipeline stage.

    Cold experts first, hot ones into the room that is left, the most loaded of all layers before the others. Each goes
    to the least loaded node, then to the least loaded rank on it.

    The paper leaves some cases open. Decided here:

    - *Load* is that of the expert's own layer. A step lasts the sum over layers of each layer's slowest rank, so a rank
      that idles in one layer makes no other layer faster.
    - A node's load is its ranks' average, full ranks included: nodes may hold different numbers of ranks, and its
      network grows with them (`World.inter` is one rank's share). A node without room is passed over.
    - Ties go to fewer homes in this layer, so that a layer without tokens is spread and not piled up; then by free
      slots (below); then to the lowest index. So all ranks agree bit for bit.

    ``order="layers"`` is the paper's: layer by layer, the largest cold load first. Ties go to fewer free slots: a rank
    that got many light experts in the layers before gets a heavy one now, and with it fewer. Its last layers find room
    on few ranks only, and a rank may become home to many light experts of one layer, for which every rank then needs
    physical slots (`place_homes`).

    ``order="loads"`` takes the cold experts of all layers by load, so that only light ones meet full ranks, and leaves
    all ranks the same room for hot ones, give or take one. Ties go to more free slots: heavy experts of different
    layers spread over ranks, and with them, later, the light ones. On recorded routing without auxiliary loss (4 layers
    of 64 experts, 8 ranks, t = 8) cold loads had an imbalance of 1.04 and the fullest rank 10 homes in a layer, in the
    paper's order 1.06 and 16. With 2 experts per rank either order may be the better one.

    Both are greedy. The sum of the layers' largest cold rank loads is at most R times the best possible, as it is for
    any placement; in the cases compared with brute force at most 5/4 (``"loads"``) and 4/3 (``"layers"``) times. The
    present homes are not looked at: about ``1 - 1/R`` of all experts move. Homes serve guests of the hot t; without
    any, hot experts that met on a rank for want of room can make them worse than the contiguous partition. And with
    guests in every slot and exact quotas, the contiguous partition leaves hardly more imbalance, at times less.

    Args:
        loads: [L, E] tokens per layer and expert, expected per iteration, >= 0.
        world: node of every rank.
        overlap_degree: t, how many experts of each layer count as hot; 0 to E.
        order: in which order cold experts choose.

    Returns:
        [L, E] int64, the rank that owns each expert; every rank appears L * E / R times.

    Raises:
        ValueError: for loads of the wrong shape, NaN, infinite or negative, homes that cannot be shared evenly, an
            overlap degree out of range and an unknown order.
    """
    loads = np.asarray(loads, dtype=np.float64)
    num_ranks = world.num_ranks
    _check(loads, num_ranks=num_ranks, overlap_degree=overlap_degree, order=order)
    num_layers, num_experts = loads.shape

    ranked = np.argsort(-loads, axis=1, kind="stable")  # [L, E] experts by load, ties by index
    cold = [(layer, int(e)) for layer in range(num_layers) for e in ranked[layer, overlap_degree:]]
    hot = [(layer, int(e)) for layer in range(num_layers) for e in ranked[layer, :overlap_degree]]
    hot.sort(key=lambda chosen: -loads[chosen])
    capacity = num_layers * num_experts // num_ranks
    if order == "loads":
        cold.sort(key=lambda chosen: -loads[chosen])
        share, odd = divmod(len(cold), num_ranks)  # `odd` ranks own one cold expert more than the others
    else:
        largest = np.where(np.arange(num_experts) < overlap_degree, 0, np.sort(loads)[:, ::-1]).max(axis=1)
        cold.sort(key=lambda chosen: -largest[chosen[0]])  # stable: by layer, then by load, as listed
        share, odd = capacity, 0

    home = np.full(loads.shape, EMPTY, dtype=np.int64)
    node = np.unique(world.node, return_inverse=True)[1]
    placed = np.zeros((num_layers, num_ranks))  # load of each rank in each layer
    homes = np.zeros((num_layers, num_ranks), dtype=np.int64)
    owned = np.zeros(num_ranks, dtype=np.int64)
    for number, (layer, expert) in enumerate(cold + hot):
        room = owned < (share + (odd > 0) if number < len(cold) else capacity)
        rank = _least_loaded(placed[layer], homes[layer], owned if order == "loads" else -owned, room=room, node=node)
        home[layer, expert] = rank
        placed[layer, rank] += loads[layer, expert]
        homes[layer, rank] += 1
        owned[rank] += 1
        odd -= owned[rank] == share + 1
    return home


def _check(loads: np.ndarray, *, num_ranks: int, overlap_degree: int, order: str) -> None:
    if loads.ndim != 2 or not loads.size:
        raise ValueError(f"loads has shape {loads.shape}, expected [layers, experts] with at least one of each")
    if not np.isfinite(loads).all() or (loads < 0).any():
        layer, expert = np.argwhere(~np.isfinite(loads) | (loads < 0))[0].tolist()
        raise ValueError(
            f"loads must be finite and >= 0, got {loads[layer, expert]} for expert {expert} of layer {layer}"
        )
    num_layers, num_experts = loads.shape
    if num_layers * num_experts % num_ranks:
        step = num_ranks // int(np.gcd(num_layers, num_ranks))
        below = num_experts // step * step
        raise ValueError(
            f"{num_layers} layers x {num_experts} experts are not divisible by {num_ranks} ranks; "
            f"use {f'{below} or ' if below else ''}{below + step} experts, or ranks that divide {loads.size}"
        )
    if not 0 <= overlap_degree <= num_experts:
        raise ValueError(f"overlap_degree={overlap_degree} is out of range: 0 to {num_experts} experts can be hot")
    if order not in ("loads", "layers"):
        raise ValueError(f"order={order!r} is unknown; use 'loads' or 'layers'")


def _least_loaded(load: np.ndarray, homes: np.ndarray, tie: np.ndarray, *, room: np.ndarray, node: np.ndarray) -> int:
    """The node with room and the least load, then fewest homes, then smallest tie; then such a rank on it. All [R]."""
    size = np.bincount(node)
    nodes = np.unique(node[room])
    keys = [(np.bincount(node, weights=key) / size)[nodes] for key in (tie, homes, load)]  # lexsort: the last one leads
    ranks = np.flatnonzero(room & (node == nodes[np.lexsort(keys)[0]]))
    return int(ranks[np.lexsort((tie[ranks], homes[ranks], load[ranks]))[0]])


def place_homes(home: np.ndarray, num_ranks: int, *, num_slots: int) -> Placement:
    """Physical slots for one layer's homes, no guests yet.

    All ranks have the same number of physical slots, P: enough for the rank with most homes and ``num_slots`` guests,
    but never more than there are experts. A rank with fewer homes has that much more room for guests.

    Args:
        home: [E] int, the rank that owns each expert.
        num_ranks: R.
        num_slots: guests that every rank has room for (fewer only where no more experts are left to be guests).

    Returns:
        A placement in which every rank's homes come first, by index. For the contiguous partition it equals
        `Placement.initial`.

    Raises:
        ValueError: if there is no such rank, or no rank could host that many guests.
    """
    home = np.array(home, dtype=np.int64)  # a copy: the placement makes it read-only
    if not ((home >= 0) & (home < num_ranks)).all():
        raise ValueError(f"home must name ranks 0 to {num_ranks - 1}, got {home.tolist()}")
    count = np.bincount(home, minlength=num_ranks)
    most = len(home) - int(count.min())
    if not 0 <= num_slots <= most:
        raise ValueError(
            f"slots={num_slots} is out of range: a rank that is home to {count.min()} of {len(home)} experts "
            f"can host 0 to {most} guests"
        )
    table = np.full((num_ranks, min(int(count.max()) + num_slots, len(home))), EMPTY, dtype=np.int64)
    for rank in range(num_ranks):
        table[rank, : count[rank]] = np.flatnonzero(home == rank)
    return Placement(home=home, table=table)


def moves(old: np.ndarray, new: np.ndarray) -> tuple[tuple[int, int, int, int], ...]:
    """What re-sharding has to move: each entry is one expert's parameters and optimizer state.

    Args:
        old: [L, E] int, homes now.
        new: [L, E] int, homes to be.

    Returns:
        (layer, expert, from rank, to rank) of every expert whose home changes, by layer, then expert.

    Raises:
        ValueError: if the two do not describe the same layers and experts.
    """
    old, new = np.asarray(old), np.asarray(new)
    if old.shape != new.shape or old.ndim != 2:
        raise ValueError(f"old has shape {old.shape}, new {new.shape}; expected the same [layers, experts]")
    layer, expert = np.nonzero(old != new)
    source, target = old[layer, expert], new[layer, expert]
    return tuple(zip(layer.tolist(), expert.tolist(), source.tolist(), target.tolist(), strict=True))
