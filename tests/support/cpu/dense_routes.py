"""Routers that return indices, and dispatchers that take them, as on Megatron's development branch (its pull request
6614), by patches of this Megatron.

There a fused router over a TransformerEngine with ``topk_indices`` (2.20) returns, for the dispatcher ``flex`` without
a capacity, the experts of each token, [T, k], int64 for DeepEP and NCCL EP and int16 for HybridEP, in no order. The
probabilities stay [T, E]. HybridEP's tokens of padding have -1 and probabilities of zero. The dispatcher makes of an
index one for each rank that shares the expert by tensor parallelism. DeepEP and NCCL EP take indices and their
probabilities; HybridEP takes indices and all probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

TYPES = {"deepep": torch.int64, "ncclep": torch.int64, "hybridep": torch.int16}
# Numbers of choices and of padding that dispatchers got.
RECEIVED = torch.zeros(2, dtype=torch.int64)


def pad(every: int) -> None:
    """Have routers take every so many-th token for padding, as HybridEP's take those of a padding mask."""
    route = TopKRouter.routing

    def routing(self: TopKRouter, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probs, routing_map = route(self, *args, **kwargs)
        is_token = (torch.arange(len(probs), device=probs.device) % every != 0).unsqueeze(1)
        return probs * is_token, routing_map & is_token

    TopKRouter.routing = routing


def install() -> None:
    """Patch routers and dispatchers; models that are built before or after have them."""
    route = TopKRouter.routing

    def routing(self: TopKRouter, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probs, routing_map = route(self, *args, **kwargs)
        config = self.config
        assert config.moe_token_dispatcher_type == "flex"
        assert config.moe_expert_capacity_factor is None, "then upstream's router returns a map"
        is_chosen, indices = routing_map.int().topk(self.topk, dim=1)
        indices = indices.masked_fill(is_chosen == 0, -1)
        turn = torch.arange(len(indices), device=probs.device).unsqueeze(1)
        order = (torch.arange(self.topk, device=probs.device) + turn) % self.topk
        return probs, indices.gather(1, order).to(TYPES[config.moe_flex_dispatcher_backend])

    TopKRouter.routing = routing
    flex = token_dispatcher.MoEFlexTokenDispatcher
    spread = flex._initialize_metadata

    def initialize(self: Any, routes: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        assert routes.dtype == TYPES[self.config.moe_flex_dispatcher_backend]
        assert routes.shape == (len(probs), self.config.moe_router_topk)
        is_padding = routes < 0
        RECEIVED.add_(torch.stack([(~is_padding).sum(), is_padding.sum()]))
        local = self.num_local_experts
        rank, expert = routes.long() // local, routes.long() % local
        tensor_rank = torch.arange(self.tp_size, device=routes.device)
        expanded = (rank.unsqueeze(2) * self.tp_size + tensor_rank) * local + expert.unsqueeze(2)
        expanded = expanded.masked_fill(is_padding.unsqueeze(2), -1).flatten(1).to(routes.dtype)
        _, probs = spread(self, probs.new_ones(probs.shape, dtype=torch.bool), probs)
        return expanded, probs

    flex._initialize_metadata = initialize
    hybrid = token_dispatcher._HybridEPManager
    set_up = hybrid.setup_metadata

    def set_up_hybrid(self: Any, indices: Tensor, probs: Tensor) -> None:
        # The library's own preprocessing.
        routing_map = torch.zeros(len(indices), self.num_experts + 1, dtype=torch.bool)
        routing_map.scatter_(1, indices.long() % (self.num_experts + 1), True)
        set_up(self, routing_map[:, :-1].contiguous(), probs)

    def set_up_indices(self: Any, indices: Tensor, probs: Tensor) -> None:
        self.token_indices, self.num_local_tokens = indices, len(indices)
        self.token_probs = probs.reshape(len(indices), self.num_experts).gather(1, indices)

    hybrid.setup_metadata = set_up_hybrid
    for manager in ("_DeepepManager", "_NCCLEPManager"):
        if hasattr(token_dispatcher, manager):  # not in 0.16
            getattr(token_dispatcher, manager).setup_metadata = set_up_indices
