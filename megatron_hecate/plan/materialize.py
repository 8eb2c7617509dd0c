"""Tier 1: which experts become guests, and where. Algorithm 1 of the Hecate paper (arXiv 2502.02581)."""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.placement import EMPTY, Placement
from megatron_hecate.plan.world import World

# Forecast imbalance below which nothing is copied: a copy costs traffic and may at best win the difference.
# Routing noise alone keeps a well balanced layer at 1.01-1.04 on the demo model.
BALANCED: float = 1.05  # max rank load / mean rank load


def plan_guests(
    forecast: np.ndarray,
    placement: Placement,
    world: World,
    *,
    overlap_degree: int | None = None,
    balanced: float = BALANCED,
) -> Placement:
    """Place guests for the next iteration.

    The paper leaves some cases open. Decided here: a copy must *pay*, so an expert whose home is not above the mean is
    no candidate, and a forecast already as balanced as ``balanced`` copies nothing; slots left over by rounding go to
    the candidate with the highest load per copy; a rank never hosts a guest of its own expert; within a node the rank
    with the least forecast load is preferred; ties go to the lowest index, so that all ranks agree bit for bit.

    Args:
        forecast: [E] tokens per expert expected in the next iteration, >= 0.
        placement: the homes; its guests, if any, are ignored.
        world: node of every rank.
        overlap_degree: t, how many experts per rank can be fetched hidden behind compute; ``None`` is no limit.
        balanced: forecast imbalance at or below which no guest is placed.

    Returns:
        ``placement`` with this plan's guests; without any when copies would not pay.

    Raises:
        ValueError: for a forecast of the wrong length, with NaN, infinite or negative entries, and for a world that
            does not fit the placement's ranks.
    """
    forecast = np.asarray(forecast, dtype=np.float64)
    if forecast.shape != placement.home.shape:
        raise ValueError(f"forecast has shape {forecast.shape}, expected [{placement.num_experts}]")
    if not np.isfinite(forecast).all() or (forecast < 0).any():
        raise ValueError(f"forecast must be finite and >= 0, got {forecast.tolist()}")

    num_ranks = placement.num_ranks
    if world.num_ranks != num_ranks:
        raise ValueError(f"world has {world.num_ranks} ranks, the placement {num_ranks}")
    bare = placement.with_guests(())
    free = (bare.table == EMPTY).sum(axis=1)  # [R] slots left
    degree = placement.num_experts if overlap_degree is None else min(overlap_degree, placement.num_experts)
    free = np.minimum(free, degree)  # m = min(m, t)
    load = np.bincount(placement.home, weights=forecast, minlength=num_ranks)  # [R]
    mean = load.mean()
    if mean == 0 or load.max() <= balanced * mean or not free.any():
        return bare

    pays = (load[placement.home] > mean) & (forecast > 0)
    by_load = np.lexsort((np.arange(len(forecast)), -forecast))
    candidates = [int(e) for e in by_load[:degree] if pays[e]]
    if not candidates:
        return bare
    if degree <= free.min():  # they all fit: every candidate everywhere
        copies = dict.fromkeys(candidates, num_ranks - 1)
    else:
        copies = _share_slots(forecast, candidates, total=int(free.sum()), most=num_ranks - 1)
    return bare.with_guests(_spread(forecast, copies, placement=bare, world=world, free=free, load=load))


def _share_slots(forecast: np.ndarray, candidates: list[int], *, total: int, most: int) -> dict[int, int]:
    """Split ``total`` slots over the candidates by load; leftovers to the highest load per copy (home included)."""
    weight = forecast[candidates] / forecast[candidates].sum()
    copies = {e: min(most, int(total * w)) for e, w in zip(candidates, weight.tolist(), strict=True)}
    for _ in range(total - sum(copies.values())):
        open_ = [e for e in candidates if copies[e] < most]
        if not open_:
            break
        # max() keeps the first of equals, and candidates are ordered by load, then index
        copies[max(open_, key=lambda e: forecast[e] / (1 + copies[e]))] += 1
    return copies


def _spread(
    forecast: np.ndarray,
    copies: dict[int, int],
    *,
    placement: Placement,
    world: World,
    free: np.ndarray,
    load: np.ndarray,
) -> list[tuple[int, int]]:
    """Choose ranks, hottest expert first: nodes with fewest copies of it, then most free slots, then least load."""
    free, load = free.copy(), load.copy()
    guests: list[tuple[int, int]] = []
    for expert, wanted in copies.items():
        holds = placement.holders[expert].copy()
        for copy in range(wanted):
            eligible = [r for r in range(placement.num_ranks) if free[r] > 0 and not holds[r]]
            if not eligible:
                break
            on_node = {r: sum(holds[q] for q in range(len(holds)) if world.node[q] == world.node[r]) for r in eligible}
            rank = min(eligible, key=lambda r: (on_node[r], -free[r], load[r], r))
            guests.append((expert, rank))
            holds[rank] = True
            free[rank] -= 1
            # the expert's load is now shared by one more holder: move that share in the forecast
            share = forecast[expert] / (copy + 2)
            before = forecast[expert] / (copy + 1)
            load[holds] += share - before
            load[rank] += before
    return guests
