"""Slots without a replica, at the end of a rank's slots and between others. Oracle: the same model without FSSDP.

Empty slots at the end cost nothing: the experts' module computes no GEMM for them.
"""

from __future__ import annotations

import itertools
from typing import Any

import planners
import pytest
import tiny_gpt
import torch.distributed as dist
import variants
from layouts import BIAS, DELAYED, FUSED_WGRAD, Layout
from quick import quick
from ranks import ranks

from megatron_hecate.plan import Placement

# For each iteration in turn, the slots of rank 0 and of rank 1 that hold a replica.
FILLED = (((1,), ()), ((0, 1, 2), (0,)), ((), (2,)), ((0, 2), (0, 1)), ((), ()), ((2,), (1, 2)))
SLOTS = 3


TWICE = dict(accumulate=2)
# layouts, and lifetimes
CASES = {
    "sequential": (Layout(2, TWICE, {}), "layer"),
    "grouped-delayed": (
        Layout(2, TWICE, dict(DELAYED, **FUSED_WGRAD), experts="grouped"),
        "iteration",
    ),
    "grouped-biases": (Layout(2, TWICE, BIAS, experts="grouped"), "layer"),
    # TransformerEngine keeps state for each GEMM, so all slots are computed
    "quantized": (Layout(2, TWICE, {}, experts="mxfp8"), "iteration"),
}


@pytest.mark.parametrize("name", quick(CASES, ["sequential", "grouped-delayed"]))
@ranks(2, preload=lambda name: CASES[name][0].packages)
def test_slots_without_replicas(name: str) -> None:

    layout, lifetime = CASES[name]
    case, _ = variants.case_of(layout)
    _train_alike(case, lifetime=lifetime, computes_all=name == "quantized")


def _train_alike(case: Any, *, lifetime: str, computes_all: bool = False) -> None:
    """Compare FSSDP with stock, and the number of experts that a forward computes with the filled slots."""
    steps = len(FILLED) + 1
    stock = tiny_gpt.train(case, steps=steps)
    turns = itertools.count()
    planners.replace_planner(lambda _, homes, *args, **kwargs: _plan(next(turns), homes, case))
    computed: list[tuple[int, int]] = []
    hook = tiny_gpt.fssdp_hook(slots=SLOTS, lifetime=lifetime)
    ours = tiny_gpt.train(case, steps=steps, hook=lambda chunks: _watch(hook(chunks), computed))
    tiny_gpt.assert_trained_alike(stock, ours)
    last = [max(slots[dist.get_rank()], default=-1) for slots in FILLED]
    homes = case.experts // dist.get_world_size()
    wanted = {homes + (SLOTS if computes_all else slot + 1) for slot in last}
    # with the plan of an iteration without any replica, Megatron's module computes
    assert {count for count, _ in computed} == wanted, (computed, wanted)
    assert any(tokens > 0 for _, tokens in computed), "no tokens were routed to this rank"


def _plan(turn: int, homes: Any, case: Any) -> Any:
    """Fill the slots of `FILLED` with the other rank's experts."""

    table = homes.table.copy()
    first = case.experts // 2
    for rank, slots in enumerate(FILLED[turn // case.layers % len(FILLED)]):
        for slot in slots:
            table[rank, first + slot] = first * (1 - rank) + slot
    return Placement(homes.home, table)


def _watch(chunks: list, computed: list[tuple[int, int]]) -> list:
    """Have the number of physical experts, and of their tokens, appended to ``computed`` in each forward of a twin."""
    for layer in tiny_gpt.moe_layers(chunks):
        twin = layer.experts.physical.twin.module

        def forward(
            hidden: Any, counts: Any, probs: Any, forward: Any = twin.forward
        ) -> tuple[Any, Any]:
            computed.append((len(counts), int(sum(counts))))
            return forward(hidden, counts, probs)

        twin.forward = forward
    return chunks
