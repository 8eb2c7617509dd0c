"""Replicas that live for a layer's forward or backward. Oracle: the same model, not converted, on the same ranks and data.

Models are deep enough for layers to share buffers: with lifetime ``layer`` a layer's replicas are dropped in every
forward and must be fetched again in the backward. ``test_parity`` covers the lifetime ``iteration``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from quick import quick
from ranks import ranks

LIFETIMES = ("layer",)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SHARDED = dict(distributed_optimizer=True, overlap=True)
COMBINED = dict(overlap_moe_expert_parallel_comm=True)
REPEATED = dict(mtp_num_layers=3, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.3)
# name: (ranks, fields of tiny_gpt.Case, fields of TransformerConfig beside four layers, late replicas)
CASES: dict[str, tuple[int, dict, dict, int]] = {
    "accumulate": (2, dict(accumulate=3), dict(num_layers=5), 0),
    "distopt-overlap": (2, dict(accumulate=2, **SHARDED), {}, 0),
    "recompute-full": (2, dict(accumulate=2), FULL, 0),
    "recompute-three-layers-at-once": (
        2,
        SHARDED,
        dict(FULL, num_layers=6, recompute_num_layers=3),
        0,
    ),
    "recompute-moe-biases": (
        2,
        dict(accumulate=2),
        dict(recompute_granularity="selective", recompute_modules=["moe"], add_bias_linear=True),
        0,
    ),
    "ep-comm-overlap": (2, dict(accumulate=3), COMBINED, 0),
    "fused-wgrad-biases": (
        2,
        dict(accumulate=2, overlap=True),
        dict(gradient_accumulation_fusion=True, add_bias_linear=True),
        0,
    ),
    "late": (2, dict(accumulate=2), {}, 4),
    "late-recompute": (2, dict(accumulate=2), FULL, 4),
    "one-expert": (2, dict(one_expert=True, accumulate=2), {}, 0),
    "bf16": (2, dict(bf16=True, accumulate=2, **SHARDED), {}, 0),
    "mtp": (2, dict(accumulate=2), dict(mtp_num_layers=1, mtp_loss_scaling_factor=0.1), 0),
    "mtp-repeated": (2, dict(accumulate=2), REPEATED, 0),
    "mtp-repeated-fused-wgrad": (
        2,
        dict(accumulate=2, overlap=True),
        dict(REPEATED, gradient_accumulation_fusion=True, num_layers=3),
        0,
    ),
    "mtp-repeated-late-recompute": (2, dict(accumulate=2), dict(REPEATED, **FULL), 4),
    "moe-every-second-layer": (2, {}, dict(num_layers=8, moe_layer_freq=2), 0),
    "pp2": (4, dict(pp=2, accumulate=4), dict(num_layers=8), 0),
    "mtp-repeated-pp2": (4, dict(pp=2, accumulate=4), dict(REPEATED, **FULL, num_layers=8), 0),
    "pp2-vpp2-late": (4, dict(pp=2, vpp=2, accumulate=4, **SHARDED), dict(num_layers=8), 3),
    "pp2-vpp2-ep-comm-overlap": (
        4,
        dict(pp=2, vpp=2, accumulate=4, **SHARDED),
        dict(COMBINED, num_layers=12),
        0,
    ),
    "tp2-etp2-recompute": (4, dict(tp=2, etp=2), FULL, 0),
    "ep4-late": (4, dict(ep=4, accumulate=2), {}, 3),
}


def _case_of(name: str) -> tuple[Any, int]:
    """The case of this name, and its number of late replicas."""
    import planners
    import tiny_gpt

    _, fields, settings, late = CASES[name]
    if "gradient_accumulation_fusion" in settings:
        tiny_gpt.install_fused_wgrad()
    if late:
        planners.replace_planner(planners.coldest_experts)
    case = tiny_gpt.Case(**fields, settings=tuple({"num_layers": 4, **settings}.items()))
    tiny_gpt.initialize(case)
    return case, late


def _compare(name: str) -> None:
    import tiny_gpt
    import torch

    case, late = _case_of(name)
    stock = tiny_gpt.train(case)
    fetched: Counter[bool] = Counter()  # in a backward, or before

    def count(what: str, *_: object) -> None:
        if what == "fetch":
            fetched[torch._C._current_graph_task_id() != -1] += 1

    for lifetime in LIFETIMES:
        hook = tiny_gpt.fssdp_hook(late_replicas=late, lifetime=lifetime)
        fetched.clear()
        ours = tiny_gpt.train(
            case, hook=lambda chunks, hook=hook: tiny_gpt.before_transfers(hook(chunks), count)
        )
        tolerance = tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5
        tiny_gpt.assert_trained_alike(stock, ours, lifetime, tolerance=tolerance)
        assert fetched[False] > 0 and (fetched[True] > 0) == (lifetime == "layer"), (
            lifetime,
            fetched,
        )
    if name not in ONCE.split():
        again = tiny_gpt.train(case, hook=hook)
        assert tiny_gpt.difference(ours, again) == tiny_gpt.SAME, "two runs differ"


# In ``make test``: each schedule and each way to recompute occurs in one.
QUICK = """
recompute-moe-biases ep-comm-overlap late-recompute pp2-vpp2-late
"""
# All others are trained twice with lifetime ``layer``; these are in `test_the_same_run_twice_on_two_ranks`.
ONCE = """
recompute-moe-biases mtp-repeated-late-recompute
"""


def _cases(num_ranks: int) -> list:
    names = [name for name, (ranks_, *_) in CASES.items() if ranks_ == num_ranks]
    return quick(names, [name for name in names if name in QUICK.split()])


def test_chosen_cases_exist() -> None:
    assert {*QUICK.split(), *ONCE.split()} <= CASES.keys()
    assert all(CASES[name][0] == 2 for name in ONCE.split())


@pytest.mark.parametrize("name", _cases(2))
@ranks(2)
def test_two_ranks(name: str) -> None:
    _compare(name)


@pytest.mark.parametrize("name", _cases(4))
@ranks(4)
def test_four_ranks(name: str) -> None:
    _compare(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONCE.split())
@ranks(2)
def test_the_same_run_twice_on_two_ranks(name: str) -> None:
    import tiny_gpt

    case, late = _case_of(name)
    hook = tiny_gpt.fssdp_hook(late_replicas=late, lifetime="layer")
    ours, again = tiny_gpt.train(case, hook=hook), tiny_gpt.train(case, hook=hook)
    assert ours.replicas > 0
    assert tiny_gpt.difference(ours, again) == tiny_gpt.SAME, "two runs differ"


@pytest.mark.parametrize(
    ("lifetime", "expected"),
    [
        ("iteration", "f1 f2 f3 f4 | r4 r3 r2 r1"),
        # two buffers: the last two layers' replicas are there when a backward begins, the first two's when it ends
        ("layer", "f1 f2 f3 f4 | r4 f2 r3 f1 r2 r1 f3 f4 | r4 f2 r3 f1 r2 r1"),
    ],
)
@ranks(2)
def test_what_is_fetched_when(lifetime: str, expected: str) -> None:
    """Fetches (f) and gradients that return (r) of two microbatches, layer by layer; | is where a backward begins."""
    import tiny_gpt
    import torch

    # with 10 experts both hot ones of every layer are at home on one rank, so every layer has replicas
    case = tiny_gpt.Case(accumulate=2, experts=10, skew=6.0, settings=(("num_layers", 4),))
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=1, hook=tiny_gpt.fssdp_hook(lifetime=lifetime))
    calls: list[str] = []
    in_backward = [False]

    def note(what: str, plan: object, slots: list, label: str) -> None:
        before, in_backward[0] = in_backward[0], torch._C._current_graph_task_id() != -1
        if in_backward[0] and not before:
            calls.append("|")
        calls.append(what[0] + label.removeprefix("layer "))

    tiny_gpt.before_transfers(run.chunks, note)
    run.step(1)
    assert all(layer.fssdp.placement.num_replicas for layer in tiny_gpt.moe_layers(run.chunks))
    assert " ".join(calls) == expected


@pytest.mark.parametrize("lifetime", quick(["iteration", *LIFETIMES], ["layer"]))
@ranks(2)
def test_reentrant_checkpoints_of_torch(lifetime: str) -> None:
    from torch.utils.checkpoint import checkpoint

    _compare_checkpointed(lambda forward, x: checkpoint(forward, x, use_reentrant=True), lifetime)


@pytest.mark.newest
@pytest.mark.parametrize("lifetime", quick(["iteration", *LIFETIMES], ["layer"]))
@ranks(2, preload="te")
def test_reentrant_checkpoints_of_transformer_engine(lifetime: str) -> None:
    import te_on_cpu

    te_on_cpu.install()
    from transformer_engine.pytorch.distributed import checkpoint

    _compare_checkpointed(checkpoint, lifetime)


def _compare_checkpointed(checkpoint: Callable[[Callable, Any], Any], lifetime: str) -> None:
    """Around the MoE layer alone, not by Megatron: nothing but the stack tells its forward from evaluation."""
    import tiny_gpt

    case = tiny_gpt.Case(accumulate=2, settings=(("num_layers", 4),))
    tiny_gpt.initialize(case)

    def checkpointed(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            layer.forward = lambda x, *_, forward=layer.forward, **__: checkpoint(forward, x)
        return chunks

    stock = tiny_gpt.train(case, hook=checkpointed)
    hook = tiny_gpt.fssdp_hook(lifetime=lifetime)
    ours = tiny_gpt.train(case, hook=lambda chunks: checkpointed(hook(chunks)))
    tiny_gpt.assert_trained_alike(stock, ours)
    with tiny_gpt.evaluating(ours.chunks):
        tiny_gpt.run(case, ours.chunks, 3, num_microbatches=2, forward_only=True)
    assert ours.step(3) == pytest.approx(stock.step(3), rel=1e-5)
