"""What TransformerEngine's operators of grouped experts call, in torch on a CPU: scaled activations, and the gradients
of scaled biases, which TE computes in Triton.

`FUNCTIONS` are formulas from TE's docstrings in fp32, differentiated by autograd. Import this module before
``te_on_cpu.install()`` and call `install` after it. Megatron's grouped experts then run TE's operators without the
kernels that fuse them, which need a Blackwell GPU.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import tex_on_cpu
import torch
from torch import Tensor


def install() -> None:
    """Let Megatron take operators for its grouped experts, and compute gradients of biases."""
    # Megatron asks for it; TE asks for a GPU's kernels as well
    os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"
    # the Triton kernel behind gradients of biases
    kernels = importlib.import_module("transformer_engine.pytorch.triton.grouped_dbias_dscales")
    kernels._launch_grouped_dbias = _dbias


def leave_out_empty_rows() -> None:
    """Buffers may have more rows than tokens, which GEMMs on a GPU leave out; call it after Megatron is imported."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    forward = TEGroupedMLP._fused_forward

    def of_filled_rows(self: Any, x: Tensor, counts: Tensor, probs: Tensor, *rest: Any) -> Tensor:
        filled = int(counts.sum())
        output = forward(self, x[:filled], counts, probs[:filled], *rest)
        return torch.cat([output, output.new_zeros(len(x) - filled, x.shape[1])])

    TEGroupedMLP._fused_forward = of_filled_rows


def of(experts: Any) -> list[torch.nn.Module]:
    """What TransformerEngine made of Megatron's ``experts`` in the last forward: operators, fused or not."""
    (sequence,) = experts._fused_ops
    (fuser,) = sequence._module_groups
    return [operator for operator, _ in fuser._forward_ops]


def _dbias(
    dy: Tensor, offsets: Tensor, dbias: Tensor, scales: Any, bias: Any, dscales: Any
) -> None:
    for group, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        rows = dy[start:end].float()
        dbias[group] += (rows if scales is None else rows * scales[start:end, None]).sum(dim=0)
        if dscales is not None:
            dscales[start:end] += rows @ bias[group].float()


def _halves(x: Tensor, interleaved: int) -> tuple[Tensor, Tensor]:
    """The gate and the linear half of ``x`` [tokens, 2 * width], in turns of ``interleaved``, if any."""
    blocks = x.unflatten(-1, (-1, 2, interleaved or x.shape[-1] // 2))
    return blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)


def _swiglu(x: Tensor, interleaved: int) -> Tensor:
    gate, linear = _halves(x, interleaved)
    return torch.nn.functional.silu(gate) * linear


def _clamped_swiglu(
    x: Tensor, limit: float, alpha: float, offset: float, interleaved: int
) -> Tensor:
    gate, linear = _halves(x, interleaved)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear.clamp(-limit, limit) + offset)


def _srelu(x: Tensor) -> Tensor:
    return x.relu().square()


def _forward(activation: Callable) -> Callable:
    def forward(x: Tensor, scales: Tensor, quantizer: None, *settings: Any) -> Tensor:
        assert quantizer is None
        return (activation(x.float(), *settings) * scales.float()[:, None]).to(x.dtype)

    return forward


def _backward(activation: Callable) -> Callable:
    def backward(
        dy: Tensor, x: Tensor, scales: Tensor, quantizer: None, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        *settings, wants_scales = settings
        assert quantizer is None
        given = [t.detach().float().requires_grad_() for t in (x, scales)]
        with torch.enable_grad():
            y = activation(given[0], *settings) * given[1][:, None]
        dx, dscales = torch.autograd.grad(y, given, dy.float())
        return dx.to(x.dtype), dscales.to(scales.dtype) if wants_scales else None

    return backward


for _activation, _names in (
    (_swiglu, ("scaled_swiglu", "scaled_dswiglu")),
    (_clamped_swiglu, ("scaled_clamped_swiglu", "scaled_clamped_dswiglu")),
    (_srelu, ("scaled_srelu", "scaled_dsrelu")),
):
    functions = _forward(_activation), _backward(_activation)
    tex_on_cpu.FUNCTIONS.update(zip(_names, functions, strict=True))
