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

from megatron_hecate.comm.collectives import gather_rows
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
        label: name of the layer in errors.
        timeout: limit in seconds for the all-gather of loads.
        exchanges: whether to count the all-to-all of `reroute`, for a dispatcher over physical
            experts that takes the counts.
    """

    def __init__(
        self,
        dispatcher: Any,
        world: World,
        *,
        label: str,
        timeout: float,
        exchanges: bool = False,
    ) -> None:
        # all ranks whose tokens reach the experts; with expert tensor parallelism, several per
        # rank of the FSSDP group
        self.sources: dist.ProcessGroup = dispatcher.tp_ep_group
        # index of this rank among them
        self._source = self.sources.rank()
        self._source_rank = [n // dispatcher.tp_size for n in range(self.sources.size())]
        self._world, self._label, self._timeout = world, label, timeout
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
        # kernels and tables are made for the device of the first placement
        self._kernels: Kernels | None = None
        self._tables: QuotaTables | None = None

    def without_padding(self, routing_map: Tensor, probs: Tensor) -> Tensor:
        """Remove the padding to capacity from a routing map, [T, E] bool.

        Padding entries have probability zero, so they change neither outputs nor gradients.
        """
        if not self._padded:
            return routing_map
        return routing_map & (probs.detach() != 0)

    @property
    def placed(self) -> Placement | None:
        """The current placement: the last argument of `place`."""
        return None if self._tables is None else self._tables.placed

    def place(self, placement: Placement, device: torch.device) -> None:
        """Route to the holders of ``placement`` from here on.

        Its tables are written into buffers of ``device`` with fixed addresses, on the current
        stream and without host synchronization.
        """
        if self._tables is None:
            shape = GroupShape(self._world, placement, self._source_rank)
            self._kernels = self._kernels or Kernels(device)
            self._tables = QuotaTables(shape, device, self._kernels)
        self._tables.place(placement)

    def count(self, routing_map: Tensor, total: Tensor | None = None) -> CountedTokens:
        """Count this source's tokens in ``routing_map`` [T, E] bool; see `CountedTokens`."""
        self._kernels = self._kernels or Kernels(routing_map.device)
        return CountedTokens(routing_map, self._kernels, total)

    def gather_loads(self, counted: CountedTokens) -> Tensor:
        """Gather the tokens of every source for every expert, [N, E] int32.

        On a GPU the current stream waits for the result, not the host.

        Raises:
            TransferError: if a rank dies or times out; the message names the layer.
        """
        return gather_rows(
            counted.loads,
            self.sources,
            what="gathering the loads",
            label=self._label,
            timeout=self._timeout,
        )

    def reroute(
        self, probs: Tensor, counted: CountedTokens, loads: Tensor
    ) -> tuple[Tensor, Tensor, Exchange | None]:
        """Reroute from experts to the current placement's physical experts.

        Every rank computes equal quotas.

        Args:
            probs: [T, E] routing probabilities, differentiable.
            counted: counts of the same tokens.
            loads: [N, E] result of `gather_loads` for the counts.

        Returns:
            The results of `routing.reroute`, and the counts of the all-to-all if ``exchanges``.
        """
        assert self._tables is not None, "place was not called"
        exchange = None
        if self._exchanges:
            parts, exchange = self._tables.parts_and_exchange(loads, self._source)
        else:
            parts = self._tables.parts(loads, self._source)
        # A backend that chooses by probability would replace a chosen expert of probability zero by
        # any physical expert, even an empty slot.
        rerouted = reroute(counted, probs, self._tables, parts, never_zero=self._by_probability)
        return *rerouted, exchange

    def to_homes(self, probs: Tensor, counted: CountedTokens) -> tuple[Tensor, Tensor]:
        """Reroute to homes, if the current placement has no replicas, without communication."""
        assert self._tables is not None, "place was not called"
        return reroute(
            counted,
            probs,
            self._tables,
            self._tables.parts_of_homes,
            never_zero=self._by_probability,
        )
