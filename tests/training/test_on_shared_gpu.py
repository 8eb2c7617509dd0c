"""Training over TransformerEngine's own kernels, on ranks that share one GPU.

    pytest tests/training/test_on_shared_gpu.py

Oracle: the same model without FSSDP, on the same ranks and data, which must repeat itself bit for bit where FSSDP
without replicas is compared bit for bit. gloo stands in for NCCL; the transport is ``nvlink``. torchrun starts this
file again, once for each case; other tests hide GPUs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import FOLDERS, torchrun

ROOT = Path(__file__).resolve().parents[2]
RANKS: int = 4
GROUPS: int = 4
SIZES = dict(hidden_size=256, ffn_hidden_size=256, moe_ffn_hidden_size=256)  # fp8 in blocks of 128
FUSED = dict(gradient_accumulation_fusion=True)
SHARDED = dict(distributed_optimizer=True, overlap=True, bucket_size=400_000)
COMBINED = dict(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])
ACTIVATION = dict(recompute_granularity="selective", recompute_modules=["moe_act", "layernorm"])
SHARED = dict(moe_shared_expert_intermediate_size=256, moe_shared_expert_overlap=True)
PADDED = dict(moe_router_padding_for_quantization=True)
FP8_GATHER = dict(fp8_param_gather=True)
LATE = dict(late_replicas=2)

# name: (fields of tiny_gpt.Case, fields of TransformerConfig, settings of FSSDP)
CASES: dict[str, tuple[dict, dict, dict]] = {
    "fused": (dict(accumulate=3), FUSED, {}),
    "unfused-bias": (dict(accumulate=2), dict(add_bias_linear=True), {}),
    "fused-bf16-distopt-overlap": (dict(bf16=True, accumulate=2, **SHARDED), FUSED, {}),
    "fused-bf16-main-grads": (dict(bf16=True, accumulate=2, grad_reduce_in_fp32=False), FUSED, {}),
    "fused-edp2-distopt-overlap": (dict(ep=2, accumulate=2, **SHARDED), FUSED, {}),
    "fused-layer": (dict(accumulate=2), dict(FUSED, num_layers=4), dict(lifetime="layer")),
    "fused-microbatch": (dict(accumulate=3), FUSED, dict(lifetime="microbatch")),
    "fused-late": (dict(accumulate=2), FUSED, LATE),
    "fused-full": (dict(accumulate=2), dict(FUSED, **FULL), {}),
    "fused-moe-layer": (
        dict(accumulate=2),
        dict(FUSED, **MOE, num_layers=4),
        dict(lifetime="layer"),
    ),
    "fused-activation": (dict(accumulate=2), dict(FUSED, **ACTIVATION), {}),
    "permute-fusion": (dict(bf16=True, accumulate=2), dict(FUSED, moe_permute_fusion=True), {}),
    "shared-experts": (dict(accumulate=2), dict(FUSED, **SHARED), {}),
    "mtp": (dict(accumulate=2), dict(FUSED, mtp_num_layers=1, mtp_loss_scaling_factor=0.1), {}),
    "delayed-fused-overlap": (
        dict(bf16=True, accumulate=4, **SHARDED),
        dict(FUSED, **COMBINED),
        {},
    ),
    "delayed-layer": (
        dict(bf16=True, accumulate=4),
        dict(FUSED, **COMBINED),
        dict(lifetime="layer"),
    ),
    "sequential": (dict(grouped=False, accumulate=2), {}, {}),
    "fp8-tensorwise": (
        dict(bf16=True, accumulate=2),
        dict(FUSED, **PADDED, fp8="hybrid", fp8_recipe="tensorwise"),
        {},
    ),
    "fp8-blockwise": (
        dict(bf16=True, accumulate=2),
        dict(FUSED, fp8="e4m3", fp8_recipe="blockwise"),
        {},
    ),
    "fp8-blockwise-stored": (
        dict(
            bf16=True,
            accumulate=2,
            **SHARDED,
            ddp=FP8_GATHER,
            optimizer=dict(fp8_recipe="blockwise"),
        ),
        dict(FUSED, **PADDED, fp8="e4m3", fp8_recipe="blockwise", fp8_param=True),
        {},
    ),
    "fp8-tensorwise-stored": (
        dict(
            bf16=True,
            accumulate=2,
            **SHARDED,
            ddp=FP8_GATHER,
            optimizer=dict(fp8_recipe="tensorwise"),
        ),
        dict(FUSED, **PADDED, fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True),
        dict(lifetime="microbatch"),
    ),
}
SAYS = "trained as stock Megatron"


def _is_missing() -> str:
    if not torch.cuda.is_available():
        return "needs a GPU, and to be run by itself"
    try:  # its compiled half is no module that could be found
        importlib.metadata.version("transformer_engine_torch")
        importlib.metadata.version("megatron_core")
    except importlib.metadata.PackageNotFoundError as missing:
        return f"needs {missing.name}"
    return ""


@pytest.mark.skipif(bool(_is_missing()), reason=_is_missing())
@pytest.mark.parametrize("group", range(GROUPS))
def test_a_shared_gpu(group: int) -> None:
    """Cases of a group train one after another in the same processes; groups can run beside each other."""
    folders = (*FOLDERS, "tests/training", "bench")
    environment = dict(
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(
            [*(str(ROOT / f) for f in folders), os.environ.get("PYTHONPATH", "")]
        ),
        PYTHONWARNINGS="ignore",
        TORCHDYNAMO_DISABLE="1",  # compiling takes longer than these cases
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
        NVTE_ALLOW_NONDETERMINISTIC_ALGO="0",
        NVIDIA_TF32_OVERRIDE="0",  # else fp32 is as rough as bf16: a last bit of an activation becomes its tenth
    )
    names = list(CASES)[group::GROUPS]
    command = [*torchrun(RANKS), __file__, *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | environment, cwd=ROOT
    )
    print(done.stdout)
    failed = [name for name in names if f"{name}: {SAYS}" not in done.stdout]
    assert not failed and done.returncode == 0, (
        f"{failed}:\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    )


def _case(name: str) -> Any:
    import tiny_gpt

    fields, settings, _ = CASES[name]
    fields = dict(ep=RANKS, grouped=True, seq=64, micro_batch=4) | fields
    fields |= {key: tuple(fields[key].items()) for key in ("ddp", "optimizer") if key in fields}
    return tiny_gpt.Case(**fields, settings=tuple({**SIZES, **settings}.items()))


def compare(name: str) -> None:
    """Train a case of stock Megatron twice, of FSSDP without replicas, and with; print a row of a table. On every rank.

    Raises:
        AssertionError: when they differ, or no replica computed a token.
    """
    import tiny_gpt
    import torch.distributed as dist

    case = _case(name)
    tiny_gpt.initialize(case)
    computed = torch.zeros(1, device="cuda")
    stock, again = tiny_gpt.train(case), tiny_gpt.train(case)
    none = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(slots=0))
    transport = "nvlink" if tiny_gpt.ON_GPU else "auto"
    hook = tiny_gpt.fssdp_hook(transport=transport, **CASES[name][2])
    ours = tiny_gpt.train(case, hook=tiny_gpt.counting_hook(hook, computed))
    repeats = tiny_gpt.difference(stock, again) == tiny_gpt.SAME
    without = tiny_gpt.difference(stock, none)
    worst = tiny_gpt.difference(stock, ours)
    dist.all_reduce(computed)
    assert ours.replicas > 0 and computed.item() > 0, "no token was computed by a replica"
    # Adam divides by roots of second moments, so that small gradients grow apart faster than large ones
    limits = dict(loss=1e-5, grad=1e-4)
    if case.bf16:
        limits = dict(loss=tiny_gpt.BF16_TOLERANCE, grad=tiny_gpt.BF16_TOLERANCE)
    settings = dict(case.settings)
    if (
        "fp8" in settings
    ):  # tokens that meet in a GEMM share scales: what quantization does is the measure
        wide = {
            key: value
            for key, value in settings.items()
            if not key.startswith("fp8") and key not in PADDED
        }
        plain = dataclasses.replace(case, settings=tuple(wide.items()), ddp=(), optimizer=())
        limits = tiny_gpt.difference(stock, tiny_gpt.train(plain))
    row = f"{name} | {ours.replicas} | {int(computed.item())} | {max(without.values()):.1e} "
    row += f"({'repeats' if repeats else 'varies'})"
    for key, limit in limits.items():
        if key in ("loss", "grad"):
            row += f" | {worst[key]:.1e} of {limit:.1e}"
    print(f"[{dist.get_rank()}] | {row} |", flush=True)
    assert without == tiny_gpt.SAME or not repeats, without
    assert worst["loss"] <= limits["loss"] and worst["grad"] <= limits["grad"], (worst, limits)


def _main(names: list[str]) -> None:
    """Run on every rank, under torchrun. A case that fails on all ranks leaves the others their turn."""
    import run_on_shared_gpu

    run_on_shared_gpu.start_process_group(minutes=0.75)
    torch.use_deterministic_algorithms(True, warn_only=True)
    import torch.distributed as dist
    from megatron.core import parallel_state
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    for name in names:
        try:
            compare(name)
        except Exception:
            traceback.print_exc()
            print(f"[{dist.get_rank()}] {name}: FAILED {traceback.format_exc()[-700:]}", flush=True)
        else:
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"{name}: {SAYS}", flush=True)
        parallel_state.destroy_model_parallel()
        FP8GlobalStateManager.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1:])
