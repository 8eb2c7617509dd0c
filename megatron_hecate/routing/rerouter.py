"""Rerouting of one layer: experts to physical experts, in front of Megatron's own dispatcher.

The router chooses among E experts. A second instance of Megatron's dispatcher is built over R x P
*physical* experts. Each token's choice of an expert becomes a choice of one of its holders, by
quota and in the order of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.device.launch import Kernels
from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.quotas import Exchange, QuotaTables
from megatron_hecate.routing.reroute import CountedTokens, reroute
from megatron_hecate.routing.tables import GroupShape


class Rerouter:
    """Rerouting of this rank's tokens to holders of their experts, in one layer.

    Args:
        dispatcher: the layer's own dispatcher, over homes.
        world: nodes of the FSSDP group.
        homes: any placement of the layer; all have equal sizes.
        device: device of the tokens.
        exchanges: whether to count the all-to-all of `reroute`, for a dispatcher over physical
            experts that takes the counts.
    """

    def __init__(
        self,
        dispatcher: Any,
        world: World,
        homes: Placement,
        device: torch.device,
        *,
        exchanges: bool = False,
    ) -> None:
        # all ranks whose tokens reach the experts; with expert tensor parallelism, several per
        # rank of the FSSDP group
        self.sources: dist.ProcessGroup = dispatcher.tp_ep_group
        # index of this rank among them
        self._source = self.sources.rank()
        source_rank = [n // dispatcher.tp_size for n in range(self.sources.size())]
        self._kernels = Kernels(device)
        # of the group, and of the placement that tokens are routed by
        self.tables = QuotaTables(GroupShape(world, homes, source_rank), device, self._kernels)
        config = dispatcher.config
        backend = None
        if config.moe_token_dispatcher_type == "flex":
            backend = config.moe_flex_dispatcher_backend
        # The first dispatch of both backends allocates one buffer for all layers, sized by the
        # number of experts, so dispatches must use physical experts from the start.
        self.always_physical = backend in ("hybridep", "ncclep")
        # both backends choose a token's experts by its largest probabilities
        self._by_probability = backend in ("deepep", "ncclep")
        self._padded = config.moe_pad_expert_input_to_capacity
        self._exchanges = exchanges

    def count(
        self, routing_map: Tensor, probs: Tensor, total: Tensor | None = None
    ) -> CountedTokens:
        """Count this source's tokens in ``routing_map``, without the padding to capacity.

        Padding entries have probability zero, so they change neither outputs nor gradients.

        Args:
            routing_map: [T, E] bool.
            probs: [T, E] routing probabilities.
            total: see `CountedTokens`.
        """
        if self._padded:
            routing_map = routing_map & (probs.detach() != 0)
        return CountedTokens(routing_map, self._kernels, total)

    def reroute(
        self, probs: Tensor, counted: CountedTokens, loads: Tensor
    ) -> tuple[Tensor, Tensor, Exchange | None]:
        """Reroute from experts to the current placement's physical experts.

        Every rank computes equal quotas.

        Args:
            probs: [T, E] routing probabilities, differentiable.
            counted: counts of the same tokens.
            loads: [N, E] int32, the counted loads of all sources.

        Returns:
            The results of `routing.reroute`, and the counts of the all-to-all if ``exchanges``.
        """
        exchange = None
        if self._exchanges:
            parts, exchange = self.tables.parts_and_exchange(loads, self._source)
        else:
            parts = self.tables.parts(loads, self._source)
        # A backend that chooses by probability would replace a chosen expert of probability zero by
        # any physical expert, even an empty slot.
        rerouted = reroute(counted, probs, self.tables, parts, never_zero=self._by_probability)
        return *rerouted, exchange

    def to_homes(self, probs: Tensor, counted: CountedTokens) -> tuple[Tensor, Tensor]:
        """Reroute to homes, if the current placement has no replicas, without communication."""
        parts = self.tables.parts_of_homes
        return reroute(counted, probs, self.tables, parts, never_zero=self._by_probability)
