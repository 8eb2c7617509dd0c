"""Models in fp8 and fp4 over TransformerEngine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import quantizers_on_cpu
import te_on_cpu
import tiny_gpt

RECIPES = ("mxfp8", "tensorwise", "tensorwise-blackwell", "blockwise", "nvfp4")


def packages(recipe: str) -> str:
    """What ranks start with: those of Hopper and of Blackwell are computed otherwise."""
    return "te" if recipe in ("tensorwise", "blockwise") else "te-blackwell"


def case_of(
    recipe: str,
    fields: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    *,
    stored: bool = False,
    exact: bool = True,
    version: str = "2.20.2",
) -> Any:
    """Put TransformerEngine in place and return an initialized case.

    Args:
        recipe: of fp8 or fp4; what follows a hyphen is the GPU's generation.
        fields: of `tiny_gpt.Case`.
        model: fields of TransformerConfig.
        stored: whether parameters are in fp8 or fp4 as well.
        exact: whether weights alone are quantized.
        version: of TransformerEngine.
    """
    name, _, _ = recipe.partition("-")
    te_on_cpu.install(version, packages=packages(recipe))
    quantizers_on_cpu.install()
    quantizers_on_cpu.exact_activations = exact
    settings: dict[str, Any] = (
        dict(fp4="e2m1") if name == "nvfp4" else dict(fp8="hybrid", fp8_recipe=name)
    )
    settings |= model or {}
    fields = {"accumulate": 2, "bf16": stored or not exact, **(fields or {})}
    ddp: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    if stored and name == "nvfp4":
        settings["fp4_param"] = True
    elif stored:
        settings["fp8_param"] = True
        optimizer["fp8_recipe"] = name
        if fields.get("distributed_optimizer"):
            reuses = dict(reuse_grad_buf_for_mxfp8_param_ag=name == "mxfp8")
            ddp |= dict(reuses, fp8_param_gather=True)
            optimizer |= reuses
    return tiny_gpt.initialized(
        grouped=True, **fields, settings=settings, ddp=ddp, optimizer=optimizer
    )


def fuse_wgrad(chunks: list) -> list:
    """Have weight gradients go straight into main gradients, as in every recipe."""
    for layer in tiny_gpt.moe_layers(chunks):
        layer.experts.linear_fc1.fuse_wgrad_accumulation = True
        layer.experts.linear_fc2.fuse_wgrad_accumulation = True
    return chunks


def hook_of(**settings: Any) -> Callable[[list], list]:
    """FSSDP in such a model."""
    return lambda chunks: tiny_gpt.fssdp_hook(**settings)(fuse_wgrad(chunks))
