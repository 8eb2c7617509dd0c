"""Figures of one step of one planner.

The modelled time of its layer is

    other compute + experts + all-to-all + routing + exposed copies, state, gradients + late copies

Other compute is three times `LayerShape.hidden_seconds` (forward, and twice that backward). The
compute before the layer hides copies and state, and an equal time hides gradients; nothing hides
late copies.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_hecate.plan import Placement
from megatron_hecate.tools.traffic import token_traffic
from rivals.copies import add
from rivals.planner import Moves, Setting
from rivals.split import Quotas

# dispatch and combine, forward and backward
TOKEN_TRIPS: int = 4
# fp32 values per fp32 gradient value: master weight and Adam's two moments
STATE_PER_GRAD: int = 3


@dataclasses.dataclass(frozen=True)
class Score:
    """Figures of one layer in one step.

    Args:
        imbalance: max / mean rank load.
        crossing: share of tokens that are computed on another node than their own.
        copies: chunks received before the gate, per rank.
        late: chunks received after the gate, per rank.
        intra_gb: GB of weights, gradients and optimizer state sent inside nodes by all ranks.
        inter_gb: GB of weights, gradients and optimizer state sent between nodes by all ranks.
        extra: experts that the fullest rank holds beyond its even share.
        seconds: modelled time of the layer.
    """

    imbalance: float
    crossing: float
    copies: float
    late: float
    intra_gb: float
    inter_gb: float
    extra: int
    seconds: float


def score(quotas: Quotas, placement: Placement, moves: Moves, setting: Setting) -> Score:
    """Compute the figures of one step.

    Args:
        quotas: tokens of each source for each holder.
        placement: placement after the gate.
        moves: chunks sent.
        setting: setting of the layer.
    """
    world = setting.world
    shape = setting.shape
    load = quotas.rank_load(setting.num_ranks)
    node = np.asarray(world.node)
    crosses = node[:, None] != node[quotas.rank][None, :]
    state_bytes = STATE_PER_GRAD * shape.grad_bytes
    early = add((moves.early, shape.expert_bytes), (moves.state, state_bytes))
    late = add((moves.late, shape.expert_bytes))
    grads = add((moves.grads, shape.grad_bytes))
    moved = add((early, 1), (late, 1), (grads, 1))
    extra = placement.holders.sum(axis=0) - setting.homes_per_rank
    experts = float((load * shape.token_seconds(world) + extra * shape.expert_seconds(world)).max())
    tokens = token_traffic(quotas.flow(setting.num_ranks), world)
    all_to_all = TOKEN_TRIPS * tokens.seconds(shape.token_bytes, world)
    # With copies, tokens must be rerouted; the cost model's price, equal for all planners.
    routing = 0.0
    if placement.holders.sum() > setting.num_experts:
        routing = world.speeds.routing * shape.microbatches
    exposed = sum(
        max(0.0, part.seconds(1, world) - shape.hidden_seconds) for part in (early, grads)
    )
    return Score(
        # A layer without tokens is balanced.
        imbalance=float(load.max() / load.mean()) if load.any() else 1.0,
        crossing=float((quotas.tokens * crosses).sum() / max(1, quotas.tokens.sum())),
        copies=(moves.early.intra_in.sum() + moves.early.inter_in.sum()) / setting.num_ranks,
        late=(moves.late.intra_in.sum() + moves.late.inter_in.sum()) / setting.num_ranks,
        intra_gb=moved.intra / 1e9,
        inter_gb=moved.inter / 1e9,
        extra=int(extra.max()),
        seconds=3 * shape.hidden_seconds
        + (experts + all_to_all + late.seconds(1, world)) * shape.microbatches
        + routing
        + exposed,
    )


def check_plan(quotas: Quotas, placement: Placement, load: np.ndarray) -> None:
    """Check that quotas are integers >= 0 that sum to the load [R, E] and only name holders.

    Raises:
        AssertionError: if a check fails.
    """
    expert = quotas.expert
    rank = quotas.rank
    tokens = quotas.tokens
    assert np.issubdtype(tokens.dtype, np.integer), f"quotas are {tokens.dtype}"
    assert tokens.min() >= 0, f"a quota is {tokens.min()}"
    assert placement.holders[expert, rank].all(), (
        "a quota names a rank that does not hold the expert"
    )
    assert (np.diff(expert * placement.num_ranks + rank) > 0).all(), (
        "holders repeat or are out of order"
    )
    first = np.flatnonzero(np.diff(expert, prepend=-1))
    assert len(first) == load.shape[1], "an expert has no holder"
    assert (np.add.reduceat(tokens, first, axis=1) == load).all(), "quotas do not sum to the load"
    assert placement.holders[np.arange(load.shape[1]), placement.home].all(), (
        "a home does not hold its expert"
    )
