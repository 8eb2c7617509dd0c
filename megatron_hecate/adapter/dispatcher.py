"""Experts in, physical experts out: Megatron's own dispatcher does the rest.

The router speaks of E experts. Megatron's dispatcher is built once more over R x P *physical* experts, and each token's
choice of an expert becomes a choice of one of its holders, by quota: of this rank's tokens for an expert, in order, the
first so many go to the first holder, the next to the second.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megatron_hecate.comm.transfer import wait_collective
from megatron_hecate.plan import Placement, PlacementTables, QuotaSolver, World


@dataclasses.dataclass(frozen=True, eq=False)
class _Holders:
    """The C holders of one placement, by expert, then rank, on the device.

    Args:
        expert: [C] int64, whose holder it is.
        first: [C] int64, the first holder of the same expert.
        physical: [C] int64, its physical expert, ``rank * P + slot``.
        num_physical: R * P.
    """

    expert: Tensor
    first: Tensor
    physical: Tensor
    num_physical: int

    @classmethod
    def of(cls, tables: PlacementTables, num_physical: int) -> _Holders:
        first = torch.searchsorted(tables.expert, tables.expert)
        return cls(tables.expert, first, tables.physical, num_physical)

    def split_tokens(self, routing_map: Tensor, probs: Tensor, quotas: Tensor) -> tuple[Tensor, Tensor]:
        """Give every token of this source a holder of each of its experts.

        Args:
            routing_map: [T, E] bool.
            probs: [T, E] routing probabilities, differentiable.
            quotas: [C] int64, this source's tokens for each holder; over an expert's holders they sum to its tokens.

        Returns:
            [T, R * P] bool routing map and [T, R * P] probabilities over physical experts.
        """
        total = torch.cumsum(quotas, dim=0)
        before = total - quotas
        # a running sum that restarts with each expert
        begin = before - before[self.first]
        end = begin + quotas
        # position of a token among those for its expert, from 1
        position = torch.cumsum(routing_map, dim=0, dtype=torch.int32)[:, self.expert]  # [T, C]
        taken = routing_map[:, self.expert] & (position > begin) & (position <= end)
        physical_map = routing_map.new_zeros(len(routing_map), self.num_physical)
        physical_map.index_copy_(1, self.physical, taken)
        physical_probs = probs.new_zeros(len(probs), self.num_physical)
        return physical_map, physical_probs.index_copy(1, self.physical, probs[:, self.expert] * taken)


class Rerouter:
    """Sends every token of this rank to a holder of its expert, in one layer.

    Args:
        dispatcher: the layer's own, over homes.
        world: nodes of the FSSDP group.
        label: name of the layer in errors.
        timeout: seconds to wait for loads.
    """

    def __init__(self, dispatcher: MoETokenDispatcher, world: World, *, label: str, timeout: float) -> None:
        # all ranks whose tokens these experts see; with expert tensor parallelism, several per rank of the FSSDP group
        self.sources: dist.ProcessGroup = dispatcher.tp_ep_group
        self._source_rank = [n // dispatcher.tp_size for n in range(self.sources.size())]
        self._world, self._label, self._timeout = world, label, timeout
        config = dispatcher.config
        backend = config.moe_flex_dispatcher_backend if config.moe_token_dispatcher_type == "flex" else None
        # its first dispatch makes one buffer for all layers, for so many experts: they must be physical from then on
        self.always_physical = backend in ("hybridep", "ncclep")
        self._by_probability = backend in ("deepep", "ncclep")  # its experts are the largest probabilities of a token
        self._padded = config.moe_pad_expert_input_to_capacity
        self._solver: QuotaSolver | None = None  # made on the device of the first loads
        self._tables: tuple[Placement, PlacementTables, _Holders] | None = None  # of the last placement

    @staticmethod
    def physical_dispatcher(stock: MoETokenDispatcher, num_physical: int) -> MoETokenDispatcher:
        """A dispatcher of the same class and groups as ``stock``, over ``num_physical`` experts per rank.

        Shared experts that overlap with communication are handed over as well.
        """
        config = copy.copy(stock.config)
        config.num_moe_experts = stock.ep_size * num_physical
        config.moe_pad_expert_input_to_capacity = False  # an expert would get its capacity on every holder
        first = stock.ep_group.rank() * num_physical
        groups = ProcessGroupCollection(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
        dispatcher = type(stock)(
            num_physical, list(range(first, first + num_physical)), config=config, pg_collection=groups
        )
        if stock.shared_experts is not None:
            dispatcher.set_shared_experts(stock.shared_experts)
        return dispatcher

    def without_padding(self, routing_map: Tensor, probs: Tensor) -> Tensor:
        """[T, E] bool routing map of the tokens that an expert was chosen for. Padding to capacity adds others, whose
        probability is zero: they change neither outputs nor gradients."""
        return routing_map & (probs.detach() != 0) if self._padded else routing_map

    def gather_loads(self, routing_map: Tensor) -> Tensor:
        """[N, E] int32 tokens of every source for every expert, from this source's ``routing_map`` [T, E].

        On a GPU the stream waits for it, not the host.

        Raises:
            TransferError: naming the layer, when a rank dies or does not answer in time.
        """
        own = routing_map.sum(dim=0, dtype=torch.int32)
        loads = own.new_empty(self.sources.size() * len(own))
        work = dist.all_gather_into_tensor(loads, own, group=self.sources, async_op=True)
        wait_collective(work, loads, self.sources, what="gathering the loads", label=self._label, timeout=self._timeout)
        return loads.view(self.sources.size(), -1)

    def reroute(self, routing_map: Tensor, probs: Tensor, loads: Tensor, placement: Placement) -> tuple[Tensor, Tensor]:
        """From experts to physical experts. Every rank computes the same quotas from the same ``loads`` [N, E].

        Args:
            routing_map: [T, E] bool.
            probs: [T, E] routing probabilities, differentiable.
            loads: what `gather_loads` gave.
            placement: who holds what.

        Returns:
            As `_Holders.split_tokens`.
        """
        solver, tables, holders = self._prepare(placement, loads.device)
        return self._split(holders, routing_map, probs, solver.row(loads, tables, self.sources.rank()))

    def to_homes(self, routing_map: Tensor, probs: Tensor, homes_only: Placement) -> tuple[Tensor, Tensor]:
        """As `reroute`, without replicas: every token goes to its experts' homes, and nothing is communicated."""
        *_, holders = self._prepare(homes_only, routing_map.device)
        return self._split(holders, routing_map, probs, routing_map.sum(dim=0))

    def _prepare(self, placement: Placement, device: torch.device) -> tuple[QuotaSolver, PlacementTables, _Holders]:
        if self._solver is None:
            self._solver = QuotaSolver(self._world, device, source_rank=self._source_rank)
        if self._tables is None or self._tables[0] is not placement:
            tables = self._solver.prepare(placement)
            self._tables = (placement, tables, _Holders.of(tables, placement.table.size))
        return self._solver, *self._tables[1:]

    def _split(self, holders: _Holders, routing_map: Tensor, probs: Tensor, quotas: Tensor) -> tuple[Tensor, Tensor]:
        physical_map, physical_probs = holders.split_tokens(routing_map, probs, quotas)
        if self._by_probability:  # a choice of probability zero would become any physical expert, an empty slot too
            least = physical_map * torch.finfo(probs.dtype).tiny
            physical_probs = torch.maximum(physical_probs, least)
        return physical_map, physical_probs
