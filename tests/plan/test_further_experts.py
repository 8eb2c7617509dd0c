"""Replicas a rank against the time that further experts of a rank take, as measured on an H200 (docs/gpu-results.md).

Oracle: every placement of a tiny group, its fullest rank by brute force, timed by the measurements.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest
from shapes import swiglu

from megatron_hecate.plan import H100, CopyCost, LayerShape, Link, Placement, World, plan_replicas

pytestmark = pytest.mark.fast
RANKS, SLOTS, TOKENS, LOADS = 3, 2, 16384, 12
HOMES = Placement.initial(RANKS, RANKS, num_slots=SLOTS)
# Copies and routing are free: what is left is the time of further experts.
SPEEDS = dataclasses.replace(H100, memory=4.8e12, routing=0.0, intra=Link(1e18, 0.0))


class Measured(NamedTuple):
    """Sizes, and milliseconds of 16,384 tokens on a rank, and of each further expert."""

    hidden: int
    ffn: int
    tokens: float
    each: float

    @property
    def shape(self) -> LayerShape:
        """At the measured time of a token, and gradients as measured: bf16."""
        shape = swiglu(self.hidden, self.ffn)
        return dataclasses.replace(
            shape,
            grad_bytes=shape.expert_bytes / 2,
            token_flops=1e-3 * self.tokens / TOKENS * SPEEDS.flops / 3,
        )


MEASURED = {
    "qwen3-30b-a3b": Measured(2048, 768, 1.12, 0.05),
    "deepseek-v3": Measured(7168, 2048, 6.67, 0.225),
    "mixtral-8x7b": Measured(4096, 14336, 25.7, 0.3),
}


def _held(placement: Placement) -> int:
    return int(placement.is_replica.sum(axis=1).max())


def _fullest(load: np.ndarray, placement: Placement) -> int:
    """Return the fullest rank of the best split, by Hall's theorem: all tokens of some experts go to their holders."""
    experts = range(RANKS)
    sets = (list(s) for n in experts for s in itertools.combinations(experts, n + 1))
    return max(
        -(-int(load[some].sum()) // int(placement.holders[some].any(axis=0).sum())) for some in sets
    )


def _placements() -> list[Placement]:
    """List all placements with 0 to 2 replicas on each rank."""
    ways = []
    for rank in range(RANKS):
        others = [expert for expert in range(RANKS) if expert != rank]
        few = (itertools.combinations(others, number) for number in range(SLOTS + 1))
        ways.append([[(e, rank) for e in of_rank] for of_rank in itertools.chain(*few)])
    return [HOMES.with_replicas(itertools.chain(*every)) for every in itertools.product(*ways)]


@pytest.mark.parametrize("name", MEASURED)
def test_as_many_replicas_a_rank_as_the_measured_times_make_fastest(name: str) -> None:
    """Skews from balanced to steep, so on both sides of each break-even."""
    measured, world, placements = MEASURED[name], World((0,) * RANKS, SPEEDS), _placements()
    cost = dataclasses.replace(measured.shape.copy_cost(world), crossing=0.0)
    right, best, chosen, uncharged = 0, 0.0, 0.0, 0.0
    for seed in range(LOADS):
        rng = np.random.default_rng(seed)
        share = rng.dirichlet(np.full(RANKS, 10 ** rng.uniform(0, 3)))
        load = np.rint(share * RANKS * 1024).astype(np.int64)

        def ms(placement: Placement, load: np.ndarray = load) -> float:
            return (
                _fullest(load, placement) * measured.tokens / TOKENS
                + _held(placement) * measured.each
            )

        fastest = min(placements, key=ms)
        plan = plan_replicas(load, HOMES, world, cost=cost)
        right += _held(plan) == _held(fastest)
        best, chosen = best + ms(fastest), chosen + ms(plan)
        uncharged += ms(plan_replicas(load, HOMES, world, cost=CopyCost()))
    # The model is within a factor of 1.7 of each measured point, and starting takes 1.2 times it.
    assert right >= LOADS - 3
    assert chosen <= 1.05 * best
    assert uncharged - best > 4 * (chosen - best)
