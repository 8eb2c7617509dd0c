"""TransformerEngine's joint operator of grouped experts, whose kernels need a Blackwell GPU, in torch on a CPU.

Like `transformer_engine.pytorch.ops.fused.grouped_mlp` it replaces the two linears and the activation, reads token
counts on the device, leaves rows that are no token's alone, saves the input in 8 bits with a scale for each block of
`BLOCK` rows, and marks what it saves for Megatron's paged stash. Each kernel is one call of a CUDA graph. Weight
gradients go through TE's own code. Call `install` after ``operators_on_cpu.install()``.
"""

from __future__ import annotations

import itertools
from typing import Any

import tex_on_cpu
import torch
from graph_capture import one_kernel
from torch import Tensor

# rows that share a scale, 32 of TransformerEngine; experts' tokens must be padded to a multiple
BLOCK = 4
_STORED, _SCALE = torch.float8_e4m3fn, torch.float8_e8m0fnu


def install() -> None:
    """Have the operators of grouped experts fused from now on, and their tokens padded."""
    import flex_backends
    from megatron.core.transformer.moe import paged_stash, token_dispatcher
    from transformer_engine.pytorch.ops.fused import grouped_mlp
    from transformer_engine.pytorch.ops.fuser import register_forward_backward_fusion

    class Joint(_Joint, grouped_mlp.FusedOperation): ...

    def fuse(operators: list, *, recipe: Any) -> list:
        return [Joint(operators)] if len(operators) == 3 else operators

    register_forward_backward_fusion(fuse, prepend=True)
    grouped_mlp.general_grouped_gemm_for_grouped_tensor = _wgrad
    paged_stash.SCALE_INV_BLOCK_SIZE = flex_backends.row_multiple = BLOCK
    token_dispatcher.get_align_size_for_quantization = lambda config: BLOCK


class _Joint:
    def fuser_forward(
        self: Any, contexts: list, x: Tensor, *, basic_op_extra_inputs: list, **_: Any
    ) -> tuple:
        from transformer_engine.pytorch.utils import mark_grouped_tensor

        fc1, _, fc2 = self.basic_ops
        (counts,), (probs,), *_ = basic_op_extra_inputs
        weights = fc1._get_weight_tensors(), fc2._get_weight_tensors()
        stored, scale, gates, inner, y = _forward(x.detach(), counts, probs.detach(), *weights)
        for context, linear in zip(contexts[::2], (fc1, fc2), strict=True):
            context.weight_requires_grad = context.requires_grad and linear.weight0.requires_grad
        if contexts[0].requires_grad:
            mark_grouped_tensor(stored, gates, probs, inner)
            scale.grouped_tensor_scale_inv = True
            contexts[0].save_for_backward(
                counts, stored, scale, gates, probs, inner, *weights[0], *weights[1]
            )
        return y, [(), (), ()]

    def fuser_backward(self: Any, contexts: list, dy: Tensor, **_: Any) -> tuple:
        fc1, _, fc2 = self.basic_ops
        counts, stored, scale, gates, probs, inner, *weights = contexts[0].saved_tensors
        dx, dprobs, dgates = _backward(dy, counts, gates, probs, weights)
        x = _restored(stored, scale)
        grads = [
            _grads(linear, context, [rows], (drows, counts))
            for linear, context, rows, drows in (
                (fc1, contexts[0], x, dgates),
                (fc2, contexts[2], inner, dy),
            )
        ]
        return dx, [grads[0], (), grads[1]], [(None,), (dprobs,), (None,)]


def _grads(linear: Any, context: Any, x: list, dy: tuple) -> list:
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    settings = dict.fromkeys(
        ("cudnn_wgrad_kernel_fn", "data_dtype", "scale_view_dtype", "sf_vec_size", "offsets")
    )
    return grouped_mlp._compute_grad_params(
        linear,
        context,
        linear.num_groups,
        (linear.out_features, linear.in_features),
        x,
        dy,
        linear.weight0.dtype,
        dy[0].device,
        None,
        None,
        use_nvfp4=False,
        use_dense_single_group=False,
        **settings,
    )


def _groups(counts: Tensor) -> list[slice]:
    """Rows of each expert."""
    return [slice(*ends) for ends in itertools.pairwise([0, *counts.cumsum(0).tolist()])]


@one_kernel
def _forward(
    x: Tensor, counts: Tensor, probs: Tensor, first: list[Tensor], second: list[Tensor]
) -> tuple[Tensor, ...]:
    groups = _groups(counts)
    assert all(rows.stop % BLOCK == 0 and rows.stop <= len(x) for rows in groups), counts
    stored, scale = _blocks(x)
    gates = x.new_full((len(x), len(first[0])), torch.nan)
    inner, y = torch.full_like(gates[:, ::2], torch.nan), torch.full_like(x, torch.nan)
    for rows, fc1, fc2 in zip(groups, first, second, strict=True):
        gates[rows] = x[rows] @ fc1.detach().t()
        inner[rows] = tex_on_cpu.FUNCTIONS["scaled_swiglu"](gates[rows], probs[rows], None, 0)
        y[rows] = inner[rows] @ fc2.detach().t()
    return stored, scale, gates, inner, y


@one_kernel
def _backward(
    dy: Tensor, counts: Tensor, gates: Tensor, probs: Tensor, weights: list[Tensor]
) -> tuple[Tensor, ...]:
    half = len(weights) // 2
    dx, dgates = torch.full_like(dy, torch.nan), torch.full_like(gates, torch.nan)
    dprobs = torch.full_like(probs, torch.nan)
    for rows, fc1, fc2 in zip(_groups(counts), weights[:half], weights[half:], strict=True):
        dinner = dy[rows] @ fc2.detach()
        dgates[rows], dprobs[rows] = tex_on_cpu.FUNCTIONS["scaled_dswiglu"](
            dinner, gates[rows], probs[rows], None, 0, True
        )
        dx[rows] = dgates[rows] @ fc1.detach()
    return dx, dprobs, dgates


def _blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [N, H] in 8 bits, and the scales of its blocks, [N / BLOCK, H], powers of two."""
    blocks = x.float().unflatten(0, (-1, BLOCK))
    scale = torch.exp2(blocks.abs().amax(dim=1).clamp(min=1e-30).log2().ceil())
    return (blocks / scale[:, None]).flatten(0, 1).to(_STORED), scale.to(_SCALE)


@one_kernel
def _restored(stored: Tensor, scale: Tensor) -> Tensor:
    return stored.float() * scale.float().repeat_interleave(BLOCK, dim=0)


def _wgrad(x: list, dy: tuple, grads: list[Tensor], *, accumulate: bool, **_: Any) -> None:
    _add_wgrad(*x, *dy, grads, accumulate)


@one_kernel
def _add_wgrad(
    x: Tensor, dy: Tensor, counts: Tensor, grads: list[Tensor], accumulate: bool
) -> None:
    for rows, grad in zip(_groups(counts), grads, strict=True):
        tex_on_cpu.write(grad, dy[rows].float().t() @ x[rows].float(), accumulate)
