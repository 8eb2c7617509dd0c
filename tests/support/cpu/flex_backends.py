"""The three libraries behind Megatron's ``flex`` dispatcher, on CPU ranks: DeepEP, HybridEP and TransformerEngine's
NCCL EP.

`install` puts them where ``megatron.core.transformer.moe.fused_a2a`` imports them. Returned tuples and layouts are those
of the real Python (``deep_ep.Buffer``, ``deep_ep.HybridEPBuffer`` of the branch hybrid-ep,
``transformer_engine.pytorch.ep`` as Megatron 0.19 calls it); what their kernels do is done by gathering all tokens. Like
the real ones they hold on to what the first call told them: `CALLS` says what that was.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from graph_capture import one_kernel
from torch import Tensor

CALLS: list[tuple[str, dict[str, Any]]] = []
TE = "transformer_engine.pytorch"
# rows of an expert are a multiple, also where Megatron asks for none, as it does in bf16
row_multiple = 1


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N * T, ...] of all ranks."""
    out = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.detach().contiguous(), group=group)
    return out


def _sum_own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part [T, ...] of ``x`` [N * T, ...], summed over ranks."""
    total = x.contiguous()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].clone()


class _ByExpert:
    """Rows of a rank's experts, expert by expert, from a routing map [T, E]; ``budget`` rows at most, and rows of zeros
    after each expert's own, up to a multiple of ``pad``. With a budget a CUDA graph may hold it: where rows come from is
    in the memory ``source``, which each replay fills anew."""

    def __init__(
        self,
        routing_map: Tensor,
        group: dist.ProcessGroup,
        num_local: int,
        budget: int | None = None,
        *,
        pad: int = 1,
    ) -> None:
        assert routing_map.dtype == torch.bool and routing_map.shape[1] == group.size() * num_local
        self.group, self.shape, self.budget = group, routing_map.shape, budget
        self.num_local, self.pad = num_local, pad
        place = self._place if budget is None else one_kernel(self._place)
        self.source, self.counts, self.wanted, self.overflow = place(routing_map)

    def _place(self, routing_map: Tensor) -> tuple[Tensor, ...]:
        """The token, -1 for none, and the column of probabilities of each row; what experts get, and what they would."""
        first = self.group.rank() * self.num_local
        own = _gather(routing_map, self.group)[:, first : first + self.num_local]
        expert, token = own.t().nonzero(as_tuple=True)
        wanted, expert, token = len(expert), expert[: self.budget], token[: self.budget]
        tokens = torch.bincount(expert, minlength=self.num_local)
        counts = (tokens + self.pad - 1) // self.pad * self.pad
        padding = counts - tokens
        shift = padding.cumsum(0) - padding  # rows of zeros before each expert's own
        rows = int(counts.sum()) if self.budget is None else self.budget
        source = torch.full((2, rows), -1)
        source[:, torch.arange(len(token)) + shift[expert]] = torch.stack([token, expert + first])
        overflow = torch.tensor(int(self.budget is not None and wanted > self.budget))
        return source, counts, torch.tensor([wanted]), overflow

    @one_kernel
    def dispatch(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        (token, column), weights = self.source, None
        if probs is not None:
            weights = _gather(probs, self.group)[token, column].where(token >= 0, 0.0)
        return _gather(x, self.group)[token].where(token[:, None] >= 0, 0.0), weights

    @one_kernel
    def combine(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        is_filled, tokens = self.source[0] >= 0, self.group.size() * self.shape[0]
        token, column = self.source[:, is_filled]
        total = x.new_zeros(tokens, x.shape[1]).index_add_(0, token, x.detach()[is_filled])
        weights = None
        if probs is not None:
            weights = probs.new_zeros(tokens, self.shape[1])
            weights[token, column] = probs.detach()[is_filled]
            weights = _sum_own(weights, self.group)
        return _sum_own(total, self.group), weights


class HybridEPBuffer:
    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        **_: Any,
    ) -> None:
        CALLS.append(("HybridEPBuffer", dict(num_local_experts=num_local_experts)))
        self.group, self.num_local_experts, self.hidden_dim = group, num_local_experts, hidden_dim

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple | None = None,
        **sizes: Any,
    ) -> tuple:
        assert hidden.shape[1] == self.hidden_dim and sizes.get("scaling_factor") is None
        if handle is None:
            num_local, pad = self.num_local_experts, sizes.get("pad_multiple") or row_multiple
            is_same = sizes["num_of_experts_per_rank"] == num_local
            assert is_same, "the real one allocates its buffer anew"
            budget = sizes["num_permuted_tokens"] if sizes.get("non_blocking") else None
            rows = _ByExpert(sizes["routing_map"], self.group, num_local, budget, pad=pad)
            handle = (rows, rows.overflow)
        x, weights = handle[0].dispatch(hidden, probs)
        return x, weights, None, handle[0].counts, handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: tuple, probs: Tensor | None = None, **_: Any
    ) -> tuple:
        return handle[0].combine(hidden, probs)


_CONFIG = types.SimpleNamespace(
    get_nvl_buffer_size_hint=lambda hidden_bytes, num_ranks: hidden_bytes * num_ranks,
    get_rdma_buffer_size_hint=lambda hidden_bytes, num_ranks: 0,
)


class Buffer:
    """DeepEP's: a token travels once to a rank, whatever the number of its experts there."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        CALLS.append(("Buffer", dict(num_nvl_bytes=num_nvl_bytes)))
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    set_num_sms = staticmethod(lambda new_num_sms: None)
    get_dispatch_config = get_combine_config = staticmethod(lambda num_ranks: _CONFIG)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **events: Any) -> tuple:
        return None, None, torch.tensor(num_experts), None, None

    def dispatch(
        self,
        x: Tensor,
        handle: tuple | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        **_: Any,
    ) -> tuple:
        x = _gather(x, self.group)
        if handle is not None:
            return x[handle[0]], None, None, None, None, _Event()
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
        num_local = int(num_tokens_per_expert) // self.group.size()
        local = _gather(topk_idx, self.group) - self.group.rank() * num_local
        is_here = (local >= 0) & (local < num_local)
        (token,) = is_here.any(dim=1).nonzero(as_tuple=True)
        local = local.where(is_here, -1)[token]
        weights = _gather(topk_weights, self.group).where(is_here, 0.0)[token]
        counts = torch.bincount(local[local >= 0], minlength=num_local).tolist()
        return x[token], local, weights, counts, (token, len(x)), _Event()

    def combine(
        self, x: Tensor, handle: tuple, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple:
        token, tokens = handle

        def back(rows: Tensor) -> Tensor:
            total = rows.new_zeros(tokens, rows.shape[1])
            return _sum_own(total.index_add_(0, token, rows.detach()), self.group)

        return back(x), None if topk_weights is None else back(topk_weights), _Event()


class _Event:
    def __init__(self, event: Any = None) -> None: ...
    def current_stream_wait(self) -> None: ...


class _EpDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, rows: _ByExpert) -> tuple:
        assert not rows.overflow, "the real one traps"
        ctx.rows, ctx.chosen = rows, chosen
        probs = torch.zeros(rows.shape).scatter_(1, chosen, weights.detach())
        return *rows.dispatch(x, probs), rows.counts

    @staticmethod
    def backward(ctx: Any, x: Tensor, weights: Tensor, counts: Any) -> tuple:
        grad, probs = ctx.rows.combine(x, weights)
        return grad, probs.gather(1, ctx.chosen), None, None


class _EpCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _ByExpert) -> Tensor:
        ctx.rows = rows
        return rows.combine(x, None)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return ctx.rows.dispatch(grad, None)[0], None


class _Ep(types.ModuleType):
    """``transformer_engine.pytorch.ep``, whose ``EpBuffer`` is for one dispatch and its combine."""

    _BOOTSTRAPPED = False
    EpBuffer = types.SimpleNamespace

    def ep_bootstrap(
        self, group: dist.ProcessGroup, *, num_experts: int, recv_capacity_per_rank: Any, **_: Any
    ) -> None:
        sizes = dict(num_experts=num_experts, recv_capacity_per_rank=recv_capacity_per_rank)
        CALLS.append(("ep_bootstrap", sizes))
        self._BOOTSTRAPPED, self.group, self.num_experts = True, group, num_experts

    def ep_dispatch(
        self, buffer: Any, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, **_: Any
    ) -> tuple:
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
        num_local, capacity = buffer.num_local_experts, buffer.recv_capacity_per_rank
        assert num_local * self.group.size() == self.num_experts, "bootstrapped for others"
        routing_map = torch.zeros(len(x), self.num_experts, dtype=torch.bool)
        routing_map.scatter_(1, topk_idx, True)
        buffer.rows = _ByExpert(routing_map, self.group, num_local, capacity, pad=row_multiple)
        buffer.total_recv_tokens = buffer.rows.wanted
        return _EpDispatch.apply(x, topk_weights, topk_idx, buffer.rows)

    def ep_combine(self, buffer: Any, x: Tensor, **_: Any) -> Tensor:
        assert buffer.recv_capacity_per_rank in (None, len(x))
        return _EpCombine.apply(x, buffer.rows)


def valid(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of NCCL EP as this Megatron takes them.

    0.19 always needs a factor. In 0.20 it selects static shapes, for the fused operators over grouped experts only.
    """
    from megatron.core.transformer import TransformerConfig

    if hasattr(TransformerConfig, "moe_ncclep_static_shape"):
        return settings
    dropped = {"moe_ncclep_static_shape"}
    is_fused = settings.get("use_transformer_engine_op_fuser")
    if settings.get("moe_flex_dispatcher_backend") == "ncclep" and not is_fused:
        dropped.add("moe_expert_rank_capacity_factor")
    return {name: value for name, value in settings.items() if name not in dropped}


def install() -> None:
    """Have Megatron find all three. It looks for them when it is imported, and so does so once more."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    deep_ep, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    deep_ep.Buffer, deep_ep.HybridEPBuffer, deep_ep.utils = Buffer, HybridEPBuffer, utils
    utils.EventHandle = utils.EventOverlap = _Event
    te = {name: types.ModuleType(name) for name in ("transformer_engine", TE)}
    te[TE].ep = _Ep(f"{TE}.ep")
    modules = {"deep_ep": deep_ep, "deep_ep.utils": utils, f"{TE}.ep": te[TE].ep, **te}
    with mock.patch.dict(sys.modules, modules):
        importlib.reload(fused_a2a)
    for name in vars(fused_a2a):
        if name in vars(token_dispatcher) and not name.startswith("_"):
            setattr(token_dispatcher, name, getattr(fused_a2a, name))


def forget() -> None:
    """A new model would be a new process."""
    from megatron.core.transformer.moe import fused_a2a

    CALLS.clear()
    fused_a2a._buffer = fused_a2a._hybrid_ep_buffer = None
    if hasattr(fused_a2a, "te_ep"):  # not in 0.16
        fused_a2a.te_ep._BOOTSTRAPPED = False
