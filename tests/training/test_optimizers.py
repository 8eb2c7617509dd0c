"""FSSDP sees the step of every optimizer that Megatron makes, and trains with it what stock Megatron trains.

Oracle: the same model without FSSDP, same ranks and optimizer. In the first test nothing but the step says that an
iteration ends: Megatron's microbatch calculator is away, and a step that is missed leaves old weights in replicas.
TransformerEngine's kernels and the package under Muon are stand-ins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers_on_cpu import BF16, PRECISION_AWARE, install, packages
from quick import quick
from ranks import ranks

# name: (fields of tiny_gpt.Case, fields of OptimizerConfig, classes that step on a rank and how often in 3 steps)
OPTIMIZERS: dict[str, tuple[dict, dict, dict[str, int]]] = {
    "apex-adam": ({}, {}, {"FusedAdam": 6}),
    "torch-sgd": ({}, dict(optimizer="sgd"), {"SGD": 6}),
    "te-adam-precision-aware": (
        BF16,
        {**PRECISION_AWARE, "exp_avg_sq_dtype": "bfloat16"},
        {"FusedAdam": 6},
    ),
    "te-adam-precision-aware-fp16-main": (
        BF16,
        {**PRECISION_AWARE, "main_params_dtype": "float16"},
        {"FusedAdam": 6},
    ),
    "muon": ({}, dict(optimizer="muon"), {"TensorParallelMuon": 6, "FusedAdam": 3}),
    "cpu-offload": (
        dict(bf16=True, distributed_optimizer=True),
        dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
        {"HybridDeviceOptimizer": 6},
    ),
    "muon-layer-wise": (
        dict(bf16=True),
        dict(optimizer="dist_muon"),
        {"TensorParallelMuon": 3, "FusedAdam": 3},
    ),
}


@pytest.mark.newest
@pytest.mark.parametrize(
    "name",
    quick(
        OPTIMIZERS,
        "apex-adam torch-sgd te-adam-precision-aware cpu-offload muon-layer-wise".split(),
    ),
)
@ranks(2, preload=packages)
def test_every_optimizer_is_seen_and_trains_alike(name: str) -> None:
    install(name)
    import tiny_gpt
    from megatron.core import num_microbatches_calculator as calculator

    fields, settings, expected = OPTIMIZERS[name]
    settings = {k: getattr(torch, v) if k.endswith("_dtype") else v for k, v in settings.items()}
    case = tiny_gpt.initialized(**fields, accumulate=2, optimizer=settings)
    calculator.unset_num_microbatches_calculator()
    stock = tiny_gpt.train(case)
    seen: Counter = Counter()
    ours = tiny_gpt.train(case, hook=_counting(tiny_gpt.fssdp_hook(), seen))
    assert expected.items() <= seen.items(), seen
    tiny_gpt.assert_trained_alike(
        stock, ours, name, tolerance=tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5
    )


@ranks(2)
def test_steps_that_no_hook_sees_are_told_by_counting() -> None:
    """A replayed CUDA graph of the step (``optimizer_cuda_graph``), or an optimizer that is none of torch's."""
    import tiny_gpt

    case = tiny_gpt.initialized(accumulate=2)

    def unseen(chunks: list) -> list:
        chunks = tiny_gpt.fssdp_hook()(chunks)
        tiny_gpt.moe_layers(chunks)[0].prefetcher.detector.before_step = lambda optimizer: None
        return chunks

    tiny_gpt.assert_trained_alike(tiny_gpt.train(case), tiny_gpt.train(case, hook=unseen))


def _counting(hook: Callable[[list], list], seen: Counter) -> Callable[[list], list]:
    """``hook``, after which ``seen`` counts the steps that the model's detector is told of, by class."""

    def convert(chunks: list) -> list:
        import tiny_gpt

        chunks = hook(chunks)
        detector = tiny_gpt.moe_layers(chunks)[0].prefetcher.detector
        before_step = detector.before_step

        def count(optimizer: Any) -> None:
            seen[type(optimizer).__name__] += 1
            before_step(optimizer)

        detector.before_step = count
        return chunks

    return convert
