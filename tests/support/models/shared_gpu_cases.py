"""Cases of training on ranks that share a GPU: `test_on_shared_gpu`, and its rehearsal on CPU ranks.

Run as a script, on every rank, this module trains a group of cases over NCCL.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import layouts
import pytest
import restarts
import tiny_gpt
import torch
import torch.distributed as dist
import training_with_moves
from layouts import DELAYED, FULL, MOE, MTP
from layouts import FUSED_WGRAD as FUSED

RANKS: int = 4
TRANSPORTS = ("nvlink", "p2p")
SIZES = dict(hidden_size=256, ffn_hidden_size=256, moe_ffn_hidden_size=256)  # fp8 in blocks of 128
SHARDED = dict(layouts.SHARDED, bucket_size=400_000)
ACTIVATION = dict(recompute_granularity="selective", recompute_modules=["moe_act", "layernorm"])
SHARED = dict(moe_shared_expert_intermediate_size=256, moe_shared_expert_overlap=True)
PADDED = dict(moe_router_padding_for_quantization=True)
CAPACITY = dict(
    moe_expert_capacity_factor=1.0,
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=1e-2,
)


def _case(fields: dict, model: dict = FUSED, **settings: Any) -> tuple[dict, dict, dict]:
    """Fields of `tiny_gpt.Case`, of TransformerConfig, and settings of FSSDP."""
    return fields, model, settings


def _fp8(recipe: str, *, stored: bool = False, **settings: Any) -> tuple[dict, dict, dict]:
    """In this recipe of fp8; parameters as well, where they are ``stored``."""
    fields: dict[str, Any] = dict(bf16=True, accumulate=2)
    model = dict(FUSED, fp8="e4m3" if recipe == "blockwise" else "hybrid", fp8_recipe=recipe)
    if stored:
        ddp, optimizer = dict(fp8_param_gather=True), dict(fp8_recipe=recipe)
        fields |= dict(SHARDED, ddp=ddp, optimizer=optimizer)
        model["fp8_param"] = True
    if stored or recipe == "tensorwise":
        model |= PADDED
    return _case(fields, model, **settings)


TWICE = dict(accumulate=2)
CASES: dict[str, dict[str, tuple[dict, dict, dict]]] = {
    "layouts": {
        "fused": _case(dict(accumulate=3)),
        "edp2-distopt-overlap": _case(dict(SHARDED, ep=2, accumulate=2)),
        "pp2-vpp2-bf16-distopt-overlap": _case(
            dict(SHARDED, ep=2, pp=2, vpp=2, accumulate=4, bf16=True)
        ),
        "tp2": _case(dict(tp=2, accumulate=2)),
        "tp2-etp2-distopt-overlap": _case(dict(SHARDED, ep=2, tp=2, etp=2, accumulate=2)),
        "cp2-bf16": _case(dict(cp=2, accumulate=2, bf16=True)),
    },
    "settings": {
        "bf16-distopt-overlap": _case(dict(SHARDED, bf16=True, accumulate=2)),
        "bf16-main-grads": _case(dict(bf16=True, accumulate=2, grad_reduce_in_fp32=False)),
        "layer": _case(TWICE, dict(FUSED, num_layers=4), lifetime="layer"),
        "late": _case(TWICE, late_replicas=2),
        "unfused-bias": _case(TWICE, dict(add_bias_linear=True)),
        "capacity-padded": _case(
            TWICE, dict(FUSED, **CAPACITY, moe_pad_expert_input_to_capacity=True)
        ),
        "sequential": _case(dict(grouped=False, accumulate=2), {}),
    },
    "schedules": {
        "full": _case(TWICE, dict(FUSED, **FULL)),
        "moe-layer": _case(TWICE, dict(FUSED, **MOE, num_layers=4), lifetime="layer"),
        "activation": _case(TWICE, dict(FUSED, **ACTIVATION)),
        "permute-fusion": _case(
            dict(bf16=True, accumulate=2), dict(FUSED, moe_permute_fusion=True)
        ),
        "shared-experts": _case(TWICE, dict(FUSED, **SHARED)),
        "mtp": _case(TWICE, dict(FUSED, **MTP)),
        "delayed-overlap": _case(dict(SHARDED, bf16=True, accumulate=4), dict(FUSED, **DELAYED)),
        "delayed-layer": _case(
            dict(bf16=True, accumulate=4), dict(FUSED, **DELAYED), lifetime="layer"
        ),
    },
    "precisions": {
        "fp8-tensorwise": _fp8("tensorwise"),
        "fp8-blockwise": _fp8("blockwise"),
        "fp8-blockwise-stored": _fp8("blockwise", stored=True),
        "fp8-tensorwise-stored": _fp8("tensorwise", stored=True, lifetime="layer"),
    },
    "life": {
        "checkpoints": _case(dict(accumulate=2, distributed_optimizer=True)),
        "moving-homes": _case(dict(ep=2, accumulate=2, distributed_optimizer=True)),
        "restart": _case(TWICE),
    },
}
SAYS = "trained as stock Megatron"


def compare(group: str, name: str) -> None:
    """Train a case with stock Megatron and with FSSDP. On every rank.

    Raises:
        AssertionError: when they differ, or no replica computed a token.
    """
    fields, settings, hecate = CASES[group][name]
    fields = dict(ep=RANKS, grouped=True, seq=64, micro_batch=4) | fields
    case = tiny_gpt.initialized(**fields, settings={**SIZES, **settings})
    run: Callable = LIVES.get(name, compare_replicas)
    run(name, case, hecate)


def compare_replicas(name: str, case: Any, settings: dict[str, Any]) -> None:
    """Compare FSSDP without replicas, and with replicas by both transports; print a row of a table."""
    stock = tiny_gpt.train(case)
    none = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(slots=0))
    without = tiny_gpt.difference(stock, none)
    repeats = without == tiny_gpt.SAME
    if not repeats:
        assert tiny_gpt.difference(stock, tiny_gpt.train(case)) != tiny_gpt.SAME, without
    limits = _limits(case, stock)
    row = f"{name} | {max(without.values()):.1e} ({'repeats' if repeats else 'stock varies'})"
    for transport in TRANSPORTS:
        computed = torch.zeros(1, device="cuda")
        hook = tiny_gpt.fssdp_hook(transport=transport, **settings)
        ours = tiny_gpt.train(case, hook=tiny_gpt.counting_hook(hook, computed))
        worst = tiny_gpt.difference(stock, ours)
        dist.all_reduce(computed)
        assert computed.item() > 0, f"{transport}: no token was computed by a replica"
        row += f" | {transport}: {int(computed.item())} tokens"
        row += "".join(f", {key} {worst[key]:.1e} of {limits[key]:.1e}" for key in limits)
        assert all(worst[key] <= limits[key] for key in limits), (transport, worst, limits)
    print(f"[{dist.get_rank()}] | {row} |", flush=True)


def _limits(case: Any, stock: Any) -> dict[str, float]:
    """Largest differences of losses and gradients."""
    # Tokens that meet in a GEMM share scales: what quantization does is the measure.
    if "fp8" in dict(case.settings):
        wide = [
            (key, value)
            for key, value in case.settings
            if not key.startswith("fp8") and key not in PADDED
        ]
        plain = dataclasses.replace(case, settings=tuple(wide), ddp=(), optimizer=())
        found = tiny_gpt.difference(stock, tiny_gpt.train(plain))
        return {key: found[key] for key in ("loss", "grad")}
    if case.bf16:
        return dict.fromkeys(("loss", "grad"), tiny_gpt.BF16_TOLERANCE)
    # Adam divides by roots of second moments, so that small gradients grow apart faster than large ones
    return dict(loss=1e-5, grad=1e-4)


def compare_checkpoints(name: str, case: Any, settings: dict[str, Any]) -> None:
    """Stock Megatron loads FSSDP's checkpoint, and FSSDP stock's; both go on alike."""
    from checkpoints import load, save, shared_folder

    hook = tiny_gpt.fssdp_hook(**settings)
    for writer, reader, direction in ((hook, None, "to"), (None, hook, "from")):
        written = tiny_gpt.train(case, hook=writer)
        folder = shared_folder(f"{direction} stock")
        save(written, folder)
        read = tiny_gpt.train(case, steps=2, hook=reader)
        load(read, folder)
        expected = [written.step(step) for step in (3, 4)]
        assert [read.step(step) for step in (3, 4)] == pytest.approx(expected, rel=1e-5)
        assert max(written.replicas, read.replicas) > 0


def compare_moving_homes(name: str, case: Any, settings: dict[str, Any]) -> None:
    """Experts change homes: bit for bit without replicas, within a tolerance with."""
    for transport in TRANSPORTS:
        training_with_moves.compare(case, transport=transport, **settings)


def compare_restart(name: str, case: Any, settings: dict[str, Any]) -> None:
    """Attempts die in a forward and before a step; the next attempt in the same process trains as stock."""
    expected = tiny_gpt.train(case, steps=restarts.STEPS).losses
    for transport in TRANSPORTS:
        hook = tiny_gpt.fssdp_hook(transport=transport, **settings)
        for place in ("forward", "before the step"):
            point = restarts.POINTS[place]
            restarts.new_attempt(case)
            losses, *_ = restarts.attempt(case, hook, point)
            assert losses == pytest.approx(expected[: len(losses)], rel=1e-5)
        restarts.new_attempt(case)
        ours = tiny_gpt.train(case, steps=restarts.STEPS, hook=hook)
        assert ours.losses == pytest.approx(expected, rel=1e-5) and ours.replicas > 0


LIVES = {
    "checkpoints": compare_checkpoints,
    "moving-homes": compare_moving_homes,
    "restart": compare_restart,
}


def _main(group: str, names: list[str]) -> None:
    """Run on every rank. A case that fails on all ranks leaves the others their turn."""
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120))
    torch.use_deterministic_algorithms(True, warn_only=True)
    from megatron.core import parallel_state
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    for name in names or CASES[group]:
        try:
            compare(group, name)
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
    _main(sys.argv[1], sys.argv[2:])
