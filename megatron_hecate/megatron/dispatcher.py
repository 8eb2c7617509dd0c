"""Megatron's token dispatchers over physical experts."""

from __future__ import annotations

import copy
import functools
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)
from torch import Tensor

from megatron_hecate.routing.quotas import Exchange

_KNOWN = (MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher)


def expert_alignment(config: Any) -> int:
    """Return the multiple of rows to which the dispatcher pads each expert's tokens; 1 for none."""
    backend = config.moe_token_dispatcher_type == "flex" and config.moe_flex_dispatcher_backend
    if backend == "ncclep" or (backend == "hybridep" and (config.fp8 or config.fp4)):
        return max(1, token_dispatcher.get_align_size_for_quantization(config))
    return 1


def rank_budget(dispatcher: Any) -> float | None:
    """Return a rank's budget of rows over the mean rank load of a microbatch, if it has one."""
    # since Megatron 0.18
    factor = getattr(dispatcher.config, "moe_expert_rank_capacity_factor", None)
    if factor is not None and dispatcher.config.moe_flex_dispatcher_backend == "hybridep":
        # HybridEP's budget is a share of one source's tokens; expert-tensor-parallel ranks get the
        # tokens of all their sources.
        return factor / dispatcher.tp_size
    return factor


class CountedAlltoAll:
    """Mixin in front of ``MoEAlltoAllTokenDispatcher`` for token counts that are known.

    Megatron's method sums the routing map and gathers the sums of all ranks. The quotas have both,
    so that the gather of loads replaces this gather, and a layer with replicas has as many
    collectives as one without.
    """

    # routing map and counts of the next dispatch
    _known: tuple[Tensor, Exchange] | None = None

    def expect(self, routing_map: Tensor, exchange: Exchange) -> None:
        """Set the counts of the dispatch of ``routing_map``, [T, R * P] bool."""
        self._known = (routing_map, exchange)

    def preprocess(self: Any, routing_map: Tensor) -> Tensor:
        """Set what Megatron's method sets, from the known counts, without communication.

        Args:
            routing_map: [T, R * P] bool. Another map than the expected one, for example one that
                Megatron has padded for quantization, is counted by Megatron's method. So are all
                maps if a framework has replaced this method.

        Returns:
            [P] int64 tokens for each physical expert of this rank.
        """
        exchange_counts = self._known
        self._known = None
        if exchange_counts is None or exchange_counts[0] is not routing_map or not _is_megatrons():
            return super().preprocess(routing_map)
        exchange = exchange_counts[1]
        if self.config.moe_expert_capacity_factor is None:
            self.num_out_tokens = routing_map.shape[0] * self.config.moe_router_topk
        else:
            # tokens may have been dropped
            self.num_out_tokens = exchange.sent.sum()
            self._maybe_update_cuda_sync_point("before_permutation_1")
        self.input_splits = exchange.sent
        received = exchange.received
        if self.tp_size == 1:
            self.output_splits = exchange.of_source
            self.output_splits_tp = exchange.total
        else:
            # sources are numbered by rank first, Megatron's rows by tensor-parallel rank first
            source_counts = exchange.of_source.view(self.ep_size, self.tp_size)
            self.output_splits = source_counts[:, self.tp_rank].contiguous()
            self.output_splits_tp = source_counts.sum(dim=0)
            received = received.view(self.ep_size, self.tp_size, -1).transpose(0, 1)
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = received.reshape(-1, self.num_local_experts)
            if not self.config.moe_permute_fusion:
                self._maybe_update_cuda_sync_point("before_permutation_2")
        return exchange.of_slot


def _is_megatrons() -> bool:
    """Return whether the all-to-all dispatcher's ``preprocess`` is Megatron's own.

    verl, for one, replaces it at run time, to count what its replayed routes contain.
    """
    code = getattr(MoEAlltoAllTokenDispatcher.preprocess, "__code__", None)
    return code is not None and code.co_filename == token_dispatcher.__file__


@functools.cache
def _counted(kind: type[MoETokenDispatcher]) -> type[MoETokenDispatcher]:
    """Return the class of all-to-all dispatchers of ``kind`` that take known counts."""
    return type(f"Counted{kind.__name__}", (CountedAlltoAll, kind), {})


def physical_dispatcher(stock: MoETokenDispatcher, num_physical: int) -> MoETokenDispatcher:
    """Build a dispatcher like ``stock`` over ``num_physical`` experts per rank.

    It has the groups of ``stock``, and its class or a subclass. It gets the shared experts that
    overlap with communication.

    Raises:
        TypeError: for a dispatcher of a class that was not tested with replicas.
    """
    if not isinstance(stock, _KNOWN):
        names = ", ".join(dispatcher.__name__ for dispatcher in _KNOWN)
        raise TypeError(
            f"the token dispatcher is a {type(stock).__name__}; FSSDP knows {names} "
            "(--moe-token-dispatcher-type allgather, alltoall or flex)"
        )
    config = copy.copy(stock.config)
    config.num_moe_experts = stock.ep_size * num_physical
    # padding would fill an expert's capacity on every holder
    config.moe_pad_expert_input_to_capacity = False
    first = stock.ep_group.rank() * num_physical
    groups = ProcessGroupCollection(
        ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group
    )
    kind = type(stock)
    if isinstance(stock, MoEAlltoAllTokenDispatcher):
        kind = _counted(kind)
    dispatcher = kind(
        num_physical, list(range(first, first + num_physical)), config=config, pg_collection=groups
    )
    if stock.shared_experts is not None:
        dispatcher.set_shared_experts(stock.shared_experts)
    return dispatcher
