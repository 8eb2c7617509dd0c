"""FSSDP sees the step of every optimizer that Megatron makes, trains with it what stock Megatron trains, and moves
whatever it keeps for experts with them: moments, main parameters, copies on the host.

Oracle: the same model without FSSDP, same ranks and optimizer; bit for bit where homes move without replicas
(`training_with_moves`). At first nothing but the step says that an iteration ends: Megatron's microbatch calculator is
away, and a step that is missed leaves old weights in replicas. TransformerEngine's kernels are stand-ins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import optimizers_on_cpu
import pytest
import rehoming_hooks
import tiny_gpt
import torch
import training_with_moves
from layouts import BIAS, SHARDED
from optimizers_on_cpu import BF16, PRECISION_AWARE
from quick import quick
from ranks import ranks

MOMENTS_IN_BF16 = dict(PRECISION_AWARE, exp_avg_sq_dtype="bfloat16")
OFFLOAD = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
# or bf16 in matrix products, which amplify the rounding of sums
MUON = dict(optimizer="muon", muon_fp32_matmul_prec="highest")
ON_HOST = dict(bf16=True, distributed_optimizer=True)
# ranks, fields of tiny_gpt.Case, of OptimizerConfig, of TransformerConfig; classes that step on a rank and how often in
# 3 steps, of rows that are trained without moves as well
OPTIMIZERS: dict[str, tuple[int, dict, dict, dict, dict[str, int]]] = {
    "apex-adam": (2, {}, {}, {}, dict(FusedAdam=6)),
    "torch-sgd": (2, {}, dict(optimizer="sgd", sgd_momentum=0.9), BIAS, dict(SGD=6)),
    "torch-sgd-without-momentum": (2, {}, dict(optimizer="sgd", sgd_momentum=0.0), {}, {}),
    "te-adam-distopt": (2, SHARDED, {}, BIAS, {}),
    "te-adam-precision-aware": (2, BF16, MOMENTS_IN_BF16, {}, dict(FusedAdam=6)),
    "te-adam-precision-aware-edp2": (4, dict(BF16, overlap=True), MOMENTS_IN_BF16, BIAS, {}),
    "te-adam-precision-aware-whole-main": (
        2,
        BF16,
        dict(MOMENTS_IN_BF16, store_param_remainders=False),
        {},
        {},
    ),
    # keeps a scale for each shard, which cannot move
    "te-adam-precision-aware-fp16-main": (
        2,
        BF16,
        dict(PRECISION_AWARE, main_params_dtype="float16"),
        {},
        dict(FusedAdam=6),
    ),
    "cpu-offload": (2, ON_HOST, OFFLOAD, {}, dict(HybridDeviceOptimizer=6)),
    "cpu-offload-precision-aware-edp2": (
        4,
        ON_HOST,
        dict(OFFLOAD, use_precision_aware_optimizer=True),
        {},
        {},
    ),
    "muon": (2, {}, MUON, {}, dict(TensorParallelMuon=6, FusedAdam=3)),
    "muon-biases": (2, {}, MUON, BIAS, {}),
    "muon-layer-wise": (
        2,
        dict(bf16=True),
        {**MUON, "optimizer": "dist_muon"},
        {},
        dict(TensorParallelMuon=3, FusedAdam=3),
    ),
    "muon-layer-wise-edp2": (4, dict(bf16=True), {**MUON, "optimizer": "dist_muon"}, BIAS, {}),
}
QUICK = "apex-adam torch-sgd te-adam-precision-aware cpu-offload muon-layer-wise".split()
SEEN = [name for name, row in OPTIMIZERS.items() if row[-1]]
MOVED = ["torch-sgd", *(name for name in OPTIMIZERS if name not in SEEN)]


def _case(name: str) -> Any:
    _, fields, settings, model, _ = OPTIMIZERS[name]
    optimizers_on_cpu.install("cpu-offload" if name.startswith("cpu-offload") else name)
    settings = {k: getattr(torch, v) if k.endswith("_dtype") else v for k, v in settings.items()}
    return tiny_gpt.initialized(**fields, accumulate=2, optimizer=settings, settings=model)


def _tolerance(case: Any) -> float:
    return tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5


@pytest.mark.newest
@pytest.mark.parametrize("name", quick(SEEN, QUICK))
@ranks(lambda name: OPTIMIZERS[name][0], preload=optimizers_on_cpu.packages)
def test_every_optimizer_is_seen_and_trains_alike(name: str) -> None:
    case = _case(name)
    tiny_gpt.microbatches.unset_num_microbatches_calculator()
    stock = tiny_gpt.train(case)
    seen: Counter = Counter()
    ours = tiny_gpt.train(case, hook=_counting(tiny_gpt.fssdp_hook(), seen))
    assert OPTIMIZERS[name][-1].items() <= seen.items(), seen
    tiny_gpt.assert_trained_alike(stock, ours, name, tolerance=_tolerance(case))


@ranks(2)
def test_steps_that_no_hook_sees_are_told_by_counting() -> None:
    """A replayed CUDA graph of the step (``optimizer_cuda_graph``), or an optimizer that is none of torch's."""
    case = tiny_gpt.initialized(accumulate=2)

    def unseen(chunks: list) -> list:
        chunks = tiny_gpt.fssdp_hook()(chunks)
        tiny_gpt.moe_layers(chunks)[0].prefetcher.detector.before_step = lambda optimizer: None
        return chunks

    tiny_gpt.assert_trained_alike(tiny_gpt.train(case), tiny_gpt.train(case, hook=unseen))


def _counting(hook: Callable[[list], list], seen: Counter) -> Callable[[list], list]:
    """``hook``, after which ``seen`` counts the steps that the model's detector is told of, by class."""

    def convert(chunks: list) -> list:
        chunks = hook(chunks)
        detector = tiny_gpt.moe_layers(chunks)[0].prefetcher.detector
        before_step = detector.before_step

        def count(optimizer: Any) -> None:
            seen[type(optimizer).__name__] += 1
            before_step(optimizer)

        detector.before_step = count
        return chunks

    return convert


@pytest.mark.newest
@pytest.mark.parametrize("name", quick(MOVED, ["torch-sgd"]))
@ranks(lambda name: OPTIMIZERS[name][0], preload=optimizers_on_cpu.packages)
def test_what_every_optimizer_keeps_moves(name: str) -> None:
    case = _case(name)
    if name.startswith("cpu-offload"):
        from megatron.core import optimizer

        # on the device too: an expert steps here and there, and rounds alike
        optimizer.Adam = torch.optim.AdamW
    training_with_moves.compare(case, tolerance=_tolerance(case))


@pytest.mark.newest
@ranks(2, preload="te")
def test_states_with_a_scale_per_shard_are_refused() -> None:
    """When FSSDP is switched on, where Megatron's arguments tell of them; else at the first look, on all ranks. Without
    moves they are none of its business."""
    case = _case("te-adam-precision-aware-fp16-main")
    from megatron.training import global_vars

    trained = tiny_gpt.train(case, steps=3, hook=rehoming_hooks.rehoming_hook())
    with pytest.raises(ValueError, match=r"leave --moe-fssdp-rehome out"):
        trained.step(3)
    for scaled in (torch.float16, torch.uint8):
        global_vars._GLOBAL_ARGS = SimpleNamespace(main_params_dtype=scaled)
        with pytest.raises(
            ValueError,
            match=rf"with main_params_dtype={scaled}: .*rehome 0 or --main-params-dtype fp32",
        ):
            tiny_gpt.build(case, rehoming_hooks.rehoming_hook())
    tiny_gpt.build(case, tiny_gpt.fssdp_hook())
