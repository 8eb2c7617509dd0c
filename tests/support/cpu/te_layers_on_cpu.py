"""The rest of TransformerEngine's models on a CPU: norms, attention, Adam, and fused parts of MoE layers.

`te_on_cpu` runs TransformerEngine's linears. This module adds what whole models need (``--transformer-impl
transformer_engine``): formulas in torch for norms, `cpu_spec.ContextParallelAttention` for TE's attention, and
Megatron's unfused functions for the Triton kernels behind ``--moe-permute-fusion`` and ``--moe-router-fusion``. Call
`install` after ``te_on_cpu.install()``, once Megatron is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import adam_on_cpu
import tex_on_cpu
import torch
from torch import Tensor


def _normalized(out: Tensor | None, value: Tensor, dtype: Any) -> Tensor:
    if out is not None:
        return out.copy_(value)
    return value.to(dtype if isinstance(dtype, torch.dtype) else tex_on_cpu.TORCH[dtype])


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: None, dtype: Any, *rest: Any
) -> tuple[Tensor, None, Tensor]:
    """Normalized ``x`` [tokens, width] and the inverse deviation of each token; ``rest`` ends with zero-centered."""
    inverse = (x.float().square().mean(dim=-1) + eps).rsqrt()
    value = x.float() * inverse[:, None] * (weight.float() + rest[-1])
    return _normalized(out, value, dtype), None, inverse


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and of ``weight``."""
    unit = x.float() * inverse[:, None]
    scaled = grad.float() * (weight.float() + rest[-1])
    dx = inverse[:, None] * (scaled - unit * (scaled * unit).mean(dim=-1, keepdim=True))
    return dx.to(x.dtype), (grad.float() * unit).sum(dim=0).to(weight.dtype)


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: None, dtype: Any,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalized ``x``, its mean and its inverse deviation."""
    gamma = weight.float() + rest[-1]
    value, *statistics = torch.native_layer_norm(x.float(), gamma.shape, gamma, bias.float(), eps)
    return _normalized(out, value, dtype), *statistics


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Gradients of ``x``, of ``weight`` and of the bias."""
    gamma, inputs = weight.float() + rest[-1], (grad.float(), x.float())
    backward = torch.ops.aten.native_layer_norm_backward
    dx, *others = backward(*inputs, gamma.shape, mean, inverse, gamma, gamma, [True] * 3)
    return dx.to(x.dtype), *(gradient.to(weight.dtype) for gradient in others)


NORMS = {f.__name__: f for f in (rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd)}
UNFUSED = """permute unpermute sort_chunks_by_idxs topk_routing_with_score_function
    compute_routing_scores_for_aux_loss switch_load_balancing_loss_func""".split()


def install() -> None:
    """Put norms, attention, TE's Adam and the parts of MoE layers in place, in this process for good."""
    from cpu_spec import ContextParallelAttention, SequenceParallelNorm
    from megatron.core import optimizer
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer.moe import moe_utils, router, token_dispatcher
    from tiny_gpt import install_fused_wgrad
    from transformer_engine.pytorch import cpp_extensions
    from transformer_engine.pytorch.optimizers import FusedAdam

    install_fused_wgrad()
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    tex_on_cpu.FUNCTIONS.update({**NORMS, **adam_on_cpu.FUNCTIONS})
    for name, function in NORMS.items():
        # this module of TE has imported what the compiled half had when it was loaded
        setattr(cpp_extensions, name, function)
    for provider in (TESpecProvider, LocalSpecProvider):
        provider.core_attention = lambda self: ContextParallelAttention
    LocalSpecProvider.layer_norm = lambda self, *_, **__: SequenceParallelNorm
    gpt_layer_specs.LNImpl = SequenceParallelNorm
    for name in UNFUSED:
        unfused = _unfused(getattr(moe_utils, name))
        for module in (moe_utils, router, token_dispatcher):
            if hasattr(module, name):
                setattr(module, name, unfused)


def _unfused(function: Callable) -> Callable:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, "fused": False})

    return run
