"""Pieces for Megatron's local layer spec that its plain torch versions refuse: sequence and context parallelism."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class SequenceParallelNorm:
    """torch's norm, its parameters marked so that Megatron sums their gradients over tensor-parallel ranks."""

    def __new__(
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any
    ) -> torch.nn.Module:
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class ContextParallelAttention(MegatronModule):
    """Causal attention that gathers keys and values over the context-parallel group (stands in for TE's)."""

    def __init__(
        self, config: Any, *_: Any, softmax_scale: Any = None, pg_collection: Any = None, **__: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        group = getattr(pg_collection, "cp", None)
        self.group = group or parallel_state.get_context_parallel_group()

    def _positions(self, rank: int, length: int) -> torch.Tensor:
        """Megatron gives rank r the slices r and 2 * size - 1 - r."""
        size = self.group.size()
        slices = torch.arange(length * size).chunk(2 * size)
        return torch.cat([slices[rank], slices[2 * size - 1 - rank]])

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> Any:
        if packed_seq_params is not None:  # sequences without padding, [tokens, heads, width]
            bounds = itertools.pairwise(packed_seq_params.cu_seqlens_q.tolist())
            inputs = (query, key, value)
            parts = [self.forward(*(x[start:end, None] for x in inputs)) for start, end in bounds]
            return torch.cat(parts)
        size, rank, length = self.group.size(), self.group.rank(), query.shape[0]
        every, own = torch.arange(length), torch.arange(length)
        if size > 1:
            key, value = (_GatherSequence.apply(x, self.group) for x in (key, value))
            every = torch.cat([self._positions(i, length) for i in range(size)])
            own = self._positions(rank, length)
        heads = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(heads, 2), value.repeat_interleave(heads, 2)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * self.scale
        scores = scores.masked_fill(every[None, :] > own[:, None], float("-inf"))
        out = torch.matmul(scores.softmax(-1).to(v.dtype), v)
        return out.permute(2, 0, 1, 3).reshape(length, query.shape[1], -1)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict:
        return {}


def for_cpu(spec: Any) -> Any:
    """``spec`` with the two classes above in place of torch's norm and attention."""
    table = {WrappedTorchNorm: SequenceParallelNorm, DotProductAttention: ContextParallelAttention}
    if isinstance(spec, type):
        return table.get(spec, spec)
    if isinstance(spec, list):
        return [for_cpu(copy.copy(item)) for item in spec]
    if isinstance(spec, ModuleSpec):
        spec.module, spec.submodules = for_cpu(spec.module), for_cpu(spec.submodules)
    elif dataclasses.is_dataclass(spec):
        for field in dataclasses.fields(spec):
            setattr(spec, field.name, for_cpu(getattr(spec, field.name)))
    return spec
