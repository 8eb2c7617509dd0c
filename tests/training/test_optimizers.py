"""FSSDP sees the step of every optimizer that Megatron makes, and trains with it what stock Megatron trains.

Oracle: the same model without FSSDP, same ranks and optimizer. In the first test nothing but the step says that an
iteration ends: Megatron's microbatch calculator is away, and a step that is missed leaves old weights in replicas.
TransformerEngine's kernels and the package under Muon are stand-ins, whose arithmetic the last tests check.
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


@pytest.mark.fast
def test_the_adam_kernels_are_adam() -> None:
    """Oracle: torch's AdamW in fp32; main parameters kept as bf16 and remainder are the fp32 ones, bitwise."""
    import adam_on_cpu

    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(1000))
    reference = torch.optim.AdamW([p], lr=0.01, weight_decay=0.1)
    plain, main, low = p.detach().clone(), p.detach().clone(), torch.zeros(1000, dtype=torch.int16)
    high = main.bfloat16()
    low.copy_((main.view(torch.int32) << 16) >> 16)
    high.copy_(((main.view(torch.int32) - low) >> 16).to(torch.int16).view(torch.bfloat16))
    moments = [[torch.zeros(1000), torch.zeros(1000)] for _ in range(2)]
    for step in (1, 2, 3):
        p.grad = torch.randn(1000)
        reference.step()
        settings = (0.01, 0.9, 0.999, 1e-8, step, True, True, 0.1)
        kernels = adam_on_cpu.FUNCTIONS
        kernels["multi_tensor_adam"](
            0, None, [[x] for x in (p.grad, plain, *moments[0])], *settings
        )
        lists = [[x] for x in (p.grad, high, *moments[1], low)]
        kernels["multi_tensor_adam_param_remainder"](0, None, lists, *settings)
        torch.testing.assert_close(plain, p.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(adam_on_cpu.join(high, low), plain)


@pytest.mark.fast
def test_newton_schulz_keeps_singular_vectors() -> None:
    """Oracle: the polynomial on the singular values of an exact decomposition."""
    import muon_on_cpu

    torch.manual_seed(0)
    x = torch.randn(8, 20, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    a, b, c = muon_on_cpu.QUINTIC
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(muon_on_cpu.newton_schulz(x, 5), u @ torch.diag(s) @ v)
    assert s.min() > 0.6 and s.max() < 1.3
