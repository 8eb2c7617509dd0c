"""Tier 1: which experts become guests, and where, from a forecast.

Two planners, same inputs: `plan_guests`, ours, and `algorithm1`, the Hecate paper's (arXiv 2502.02581), kept as the
measure of what ours wins. Algorithm 1 copies what is overloaded in the forecast. Ours knows that exact quotas will be
computed from the true loads later (`route`), so it looks for guests through which tokens can flow wherever they turn
out to be needed: it fills the slots it may use, and hedges against the forecast's error (`search`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_hecate.plan.best import busiest, looks_ahead, plan_best
from megatron_hecate.plan.bill import Bill
from megatron_hecate.plan.drift import are_loads
from megatron_hecate.plan.flow import NO_LIMIT
from megatron_hecate.plan.lanes import LANES
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.search import SCALE, scale
from megatron_hecate.plan.swap import GOAL
from megatron_hecate.plan.world import World

# Ranks up to which each of the plans that are compared by their cost is searched from several starts. In larger groups
# that takes up to twice as long, and on the traces in bench/data the cheapest is cheaper by 0.02 % at most.
THOROUGH: int = 16


def plan_guests(
    forecast: np.ndarray,
    placement: Placement,
    world: World,
    *,
    scenarios: Callable[[], np.ndarray | None] | None = None,
    previous: Placement | None = None,
    overlap_degree: int | None = None,
    copies: int | None = None,
    copy_tokens: float = 0.0,
    hidden: int = 0,
    contention: float = 0.0,
    routing_tokens: float = 0.0,
    egress: int | None = None,
    reconsider: bool = True,
) -> Placement:
    """Place guests for the next iteration.

    With slots, overlap degree and egress as limits, as many guests per rank as minimize

        largest rank load expected of the forecast, + what that usually misses
        + ``copy_tokens`` x copies that the busiest rank receives or sends (+ ``routing_tokens`` for any).

    Args:
        forecast: [E] tokens per expert expected in the next iteration, >= 0.
        placement: the homes; its guests, if any, are ignored.
        world: node of every rank.
        scenarios: gives [S, E] loads that may come instead of the forecast (`observe.LoadHistory.scenarios`), 32 at
            most, where asked: in groups of up to 281 ranks, guests that are alone on their ranks are planned for
            these; more of them leave so little that the hedge does.
        previous: the plan of the last iteration, if it has the same homes. It is returned itself when it is still good:
            when it balances the forecast, with all guests it may have, within 1/128 of a mean rank load, or all
            scenarios. Without a price, large graphs (more than 273 experts and guests) are planned anew.
        overlap_degree: t, how many experts per rank can be fetched hidden behind compute; ``None`` is no limit.
        copies: guests in all, at most; ``None`` is no limit beyond the slots.
        copy_tokens: what one copy on the busiest rank costs, in tokens (`LayerShape.copy_tokens` for copies that
            are not hidden). 0 fills the slots.
        hidden: copies on the busiest rank that hide behind compute.
        contention: what such a copy costs, as a part of ``copy_tokens``.
        routing_tokens: what routing to guests costs at all, likewise (`LayerShape.routing_tokens`).
        egress: copies that may leave one rank; ``None`` is no limit.
        reconsider: with a price, whether to look at all numbers of guests. Otherwise ``previous`` says how many, and
            how many copies may leave one rank (or twice as many as a rank has guests), and they are placed as without
            a price, for as long as perfect balance pays for them: several times as fast, and good for a few iterations.

    Returns:
        ``placement`` with this plan's guests; without any when copies would not pay.

    Raises:
        ValueError: for a forecast, or scenarios that are asked for, of the wrong length, with NaN, infinite or negative
            entries, for more scenarios than 32, for limits or a price below 0, and for a world that does not fit the
            placement's ranks.
    """
    forecast = np.asarray(forecast, dtype=np.float64)
    _check_shapes(forecast, placement, world)
    for name, limit in (("overlap_degree", overlap_degree), ("copies", copies), ("egress", egress)):
        if limit is not None and limit < 0:
            raise ValueError(f"{name}={limit} must be 0 or more, or None for no limit")
    if not (copy_tokens >= 0 and routing_tokens >= 0 and hidden >= 0 and 0 <= contention <= 1):
        raise ValueError(
            f"copy_tokens={copy_tokens}, routing_tokens={routing_tokens} and hidden={hidden} must be 0 or more, and "
            f"contention={contention} between 0 and 1"
        )
    bare = placement.without_guests
    scaled, total, largest = scale(forecast, bare.home, bare.num_ranks)
    if total < 0:
        raise ValueError(_bad(forecast))
    if total == 0:
        return bare
    last = bare
    if previous is not None and previous.table.shape == bare.table.shape and _same(previous.home, bare.home):
        last = previous  # whether it fits the limits is seen where it is needed
    copies = NO_LIMIT if copies is None else min(copies, NO_LIMIT)
    egress = NO_LIMIT if egress is None else min(egress, NO_LIMIT)
    most_per_rank = bare.slots_per_rank if overlap_degree is None else min(overlap_degree, bare.slots_per_rank)
    most_per_rank = min(most_per_rank, bare.most_free)
    if copy_tokens + routing_tokens == 0:
        inputs = scaled, _scenarios(scenarios, bare, most_per_rank == 1), bare.home, bare.table, world.order, last.table
        table, _, received, _ = plan_best(*inputs, most_per_rank, copies, egress, False, False)
        return _planned(table, bare, last) if received else bare
    bill = Bill(
        mean=int(scaled.sum()) / bare.num_ranks,
        peak=float(largest),
        copy=copy_tokens * SCALE / total,
        hidden=hidden,
        contention=contention,
        routing=routing_tokens * SCALE / total,
    )
    received_last, sent_last = busiest(last.table, bare.home)
    goes_on = not reconsider and 0 < received_last <= most_per_rank
    # with more slots single guests are an alternative where copies cost
    others = _scenarios(scenarios, bare, not goes_on or received_last == 1)
    inputs = scaled, others, bare.home, bare.table, world.order, last.table
    if goes_on:
        leaving = min(egress, max(sent_last, 2 * received_last))
        table, _, received, sent = plan_best(*inputs, received_last, copies, leaving, False, True)
        if received and bill.of(bill.mean, received=received, busiest=max(received, sent)) < bill.peak:
            return _planned(table, bare, last)
        if received_last > 1:
            inputs = scaled, _scenarios(scenarios, bare, True), *inputs[2:]
    # A hot home sends a copy to every rank, unless it is cheaper that it sends no more than twice what a rank receives.
    # So there are two kinds of plan for each number of guests. First what the last plan may be kept for, then what may
    # be cheapest.
    kinds, quick = [], bare.num_ranks > THOROUGH
    for per_rank in range(most_per_rank, 0, -1):
        for leaving in sorted({egress, min(egress, 2 * per_rank)}, reverse=True):
            like_last = per_rank == received_last and leaving == egress
            kinds.append((not like_last, bill.least(received=per_rank, sent=leaving), per_rank, leaving))
    best, best_cost, frugal = None, bill.peak, set()
    slack = bill.mean / GOAL  # what plans may cost more than the cheapest
    for _, least, per_rank, leaving in sorted(kinds, key=lambda kind: kind[:2]):
        if least >= (best_cost if best is None else best_cost - slack) or per_rank in frugal:
            continue
        table, left, received, sent = plan_best(*inputs, per_rank, copies, leaving, True, quick)
        if not received:
            continue
        if sent <= 2 * per_rank:
            frugal.add(per_rank)  # whatever it was allowed
        its_cost = bill.of(left, received=received, busiest=max(received, sent))
        if its_cost < best_cost:
            best, best_cost = table, its_cost
    return bare if best is None else _planned(best, bare, last)


def _same(homes: np.ndarray, others: np.ndarray) -> bool:
    return homes is others or np.array_equal(homes, others)


def _planned(table: np.ndarray, bare: Placement, last: Placement) -> Placement:
    """The plan with this table: ``last`` itself, with all that was derived from it, if its table is the same."""
    same = table.tobytes() == last.table.tobytes()  # tables are of one shape and type
    return last if same else Placement.trusted(bare.home, table)


def _scenarios(source: Callable[[], np.ndarray | None] | None, bare: Placement, single: bool) -> np.ndarray:
    """[E, S] float32 of them; none unless guests may be ``single``."""
    scenarios = source() if source is not None and single and looks_ahead(bare.num_ranks) else None
    if scenarios is None:
        return np.empty((bare.num_experts, 0), np.float32)
    scenarios = np.asarray(scenarios)
    if scenarios.ndim != 2 or scenarios.shape[1] != bare.num_experts:
        raise ValueError(f"scenarios have shape {scenarios.shape}, expected [up to {LANES}, {bare.num_experts}]")
    if len(scenarios) > LANES:
        raise ValueError(f"{len(scenarios)} scenarios are more than the planner looks at together; give up to {LANES}")
    exact = scenarios if scenarios.dtype == np.float32 else scenarios.astype(np.float64)
    if not are_loads(exact.ravel(order="K")):
        raise ValueError(f"scenarios must be finite and >= 0, got {exact.min()} to {exact.max()}")
    if exact is not scenarios:  # the range of float32 is smaller, and only proportions matter
        _, exponent = np.frexp(exact.max(axis=1, initial=0.0, keepdims=True))
        exact = np.ldexp(exact, -exponent)
    by_expert = np.ascontiguousarray(exact.T, dtype=np.float32)
    if not by_expert.flags.writeable:  # another type for numba, which would compile the planner once more
        by_expert = by_expert.copy()
    return by_expert


def _check_shapes(forecast: np.ndarray, placement: Placement, world: World) -> None:
    if forecast.shape != placement.home.shape:
        raise ValueError(f"forecast has shape {forecast.shape}, expected [{placement.num_experts}]")
    if world.num_ranks != placement.num_ranks:
        raise ValueError(f"world has {world.num_ranks} ranks, the placement {placement.num_ranks}")


def _bad(forecast: np.ndarray) -> str:
    return f"forecast must be finite and >= 0, got {forecast.tolist()}"


def _checked(forecast: np.ndarray, placement: Placement, world: World) -> tuple[np.ndarray, Placement]:
    """The forecast as float64, and the placement without guests."""
    forecast = np.asarray(forecast, dtype=np.float64)
    _check_shapes(forecast, placement, world)
    if not are_loads(forecast):
        raise ValueError(_bad(forecast))
    return forecast, placement.without_guests


def algorithm1(
    forecast: np.ndarray, placement: Placement, world: World, *, overlap_degree: int | None = None
) -> Placement:
    """The paper's Algorithm 1: share the slots among the most loaded experts, in proportion to their load.

    The paper leaves some cases open. Decided here: a copy must *pay*, so an expert whose home is not above the mean is
    no candidate; slots left over by rounding go to the candidate with the highest load per copy; a rank never hosts a
    guest of its own expert; within a node the rank with the least forecast load is preferred; ties go to the lowest
    index, so that all ranks agree bit for bit.

    Args, returns, raises: as `plan_guests`.
    """
    forecast, bare = _checked(forecast, placement, world)
    num_ranks = placement.num_ranks
    if overlap_degree is not None and overlap_degree < 0:
        raise ValueError(f"overlap_degree={overlap_degree} must be 0 or more, or None for no limit")
    degree = placement.num_experts if overlap_degree is None else min(overlap_degree, placement.num_experts)
    free = np.minimum(bare.free_slots, degree)
    load = np.bincount(placement.home, weights=forecast, minlength=num_ranks)  # [R]
    mean = load.mean()
    if mean == 0 or not free.any():
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
