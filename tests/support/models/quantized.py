"""Models in fp8 and fp4 over TransformerEngine."""

from __future__ import annotations

from typing import Any

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)

MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])

DELAYED = dict(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)

# name: (ranks, recipe, fields of tiny_gpt.Case, fields of TransformerConfig, settings of FSSDP)
Layout = tuple[int, str, dict, dict, dict]


def packages(recipe: str) -> str:
    """What ranks start with: those of Hopper and of Blackwell are computed otherwise."""
    name, _, other = recipe.partition("-")
    return "te" if name in ("tensorwise", "blockwise") and not other else "te-blackwell"


def case_of(
    layout: Layout, *, stored: bool = False, exact: bool = True, version: str = "2.20.2"
) -> Any:
    import quantizers_on_cpu
    import te_on_cpu

    _, recipe, fields, further, _ = layout
    name, _, _ = recipe.partition("-")
    te_on_cpu.install(version, packages=packages(recipe))
    quantizers_on_cpu.install()
    quantizers_on_cpu.exact_activations = exact
    import tiny_gpt

    settings: dict[str, Any] = (
        dict(fp4="e2m1") if name == "nvfp4" else dict(fp8="hybrid", fp8_recipe=name)
    )
    settings |= further
    ddp: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    if stored and name == "nvfp4":
        settings["fp4_param"] = True
    elif stored:
        settings["fp8_param"] = True
        optimizer["fp8_recipe"] = name
        if fields.get("distributed_optimizer"):
            ddp["fp8_param_gather"] = True
            ddp["reuse_grad_buf_for_mxfp8_param_ag"] = optimizer[
                "reuse_grad_buf_for_mxfp8_param_ag"
            ] = name == "mxfp8"
    fields = {"accumulate": 2, "bf16": stored or not exact, **fields}
    config = dict(settings=settings, ddp=ddp, optimizer=optimizer)
    case = tiny_gpt.Case(
        grouped=True, **fields, **{name: tuple(d.items()) for name, d in config.items()}
    )
    tiny_gpt.initialize(case)
    return case


def hook_of(layout: Layout | None) -> Any:
    """Weight gradients go straight into main gradients, as in every recipe; FSSDP as ``layout`` has it."""
    import tiny_gpt

    def hook(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            layer.experts.linear_fc1.fuse_wgrad_accumulation = True
            layer.experts.linear_fc2.fuse_wgrad_accumulation = True
        return chunks if layout is None else tiny_gpt.fssdp_hook(**layout[4])(chunks)

    return hook
