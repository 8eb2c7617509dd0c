"""Whatever an optimizer keeps for experts moves with them: moments, main parameters, copies on the host.

Oracle: stock Megatron with the same optimizer on the same ranks; bit for bit without replicas (`training_with_moves`).
How optimizers are made to run on a CPU is told in `test_optimizers`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import optimizers_on_cpu
import pytest
import rehoming_hooks
import torch
import training_with_moves
from quick import quick
from ranks import ranks

pytestmark = pytest.mark.newest
DISTOPT = dict(distributed_optimizer=True, overlap=True)
MOMENTS_IN_BF16 = dict(optimizers_on_cpu.PRECISION_AWARE, exp_avg_sq_dtype="bfloat16")
OFFLOAD = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
BIASES = dict(add_bias_linear=True)
# name, which begins as in test_optimizers: (ranks, fields of tiny_gpt.Case, of OptimizerConfig, of TransformerConfig)
OPTIMIZERS: dict[str, tuple[int, dict, dict, dict]] = {
    "torch-sgd": (2, {}, dict(optimizer="sgd", sgd_momentum=0.9), BIASES),
    "torch-sgd-without-momentum": (2, {}, dict(optimizer="sgd", sgd_momentum=0.0), {}),
    "te-adam-distopt": (2, DISTOPT, {}, BIASES),
    "te-adam-precision-aware-edp2": (
        4,
        dict(optimizers_on_cpu.BF16, overlap=True),
        MOMENTS_IN_BF16,
        BIASES,
    ),
    "te-adam-precision-aware-whole-main": (
        2,
        optimizers_on_cpu.BF16,
        dict(MOMENTS_IN_BF16, store_param_remainders=False),
        {},
    ),
    "cpu-offload-precision-aware-edp2": (
        4,
        dict(bf16=True, distributed_optimizer=True),
        dict(OFFLOAD, use_precision_aware_optimizer=True),
        {},
    ),
    "muon-biases": (2, {}, dict(optimizer="muon"), BIASES),
    "muon-layer-wise-edp2": (4, dict(bf16=True), dict(optimizer="dist_muon"), BIASES),
}


def _case(name: str) -> Any:
    optimizers_on_cpu.install("cpu-offload" if name.startswith("cpu-offload") else name)
    import tiny_gpt
    from megatron.core import optimizer

    if name.startswith("cpu-offload"):
        optimizer.Adam = (
            torch.optim.AdamW
        )  # on the device too: an expert steps here and there, and rounds alike
    _, fields, settings, of_model = OPTIMIZERS[name]
    settings = {k: getattr(torch, v) if k.endswith("_dtype") else v for k, v in settings.items()}
    case = tiny_gpt.initialized(**fields, accumulate=2, optimizer=settings, settings=of_model)
    return case


@pytest.mark.parametrize("name", quick(OPTIMIZERS, ["torch-sgd"]))
@ranks(lambda name: OPTIMIZERS[name][0], preload=optimizers_on_cpu.packages)
def test_optimizers(name: str) -> None:
    case = _case(name)
    import tiny_gpt

    training_with_moves.compare(case, tolerance=tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5)


@ranks(2, preload="te")
def test_states_with_a_scale_per_shard_are_refused() -> None:
    """When FSSDP is switched on, where Megatron's arguments tell of them; else at the first look, on all ranks. Without
    moves they are none of its business."""
    optimizers_on_cpu.install("te-adam-precision-aware")

    import tiny_gpt
    from megatron.training import global_vars

    settings = dict(
        use_precision_aware_optimizer=True,
        main_grads_dtype=torch.bfloat16,
        main_params_dtype=torch.float16,
    )
    case = tiny_gpt.initialized(**optimizers_on_cpu.BF16, optimizer=settings)
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
