"""Logical experts in, physical experts out: Megatron's own dispatcher does the rest.

The router speaks of E experts. Megatron's dispatcher is built once more over R x P *physical* experts, and each token's
choice of an expert becomes a choice of one of its holders, by quota: of this rank's tokens for an expert, in order, the
first so many go to the first holder, the next to the second.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megatron_hecate.p2p import finish
from megatron_hecate.plan import Placement
from megatron_hecate.plan.placement import EMPTY


def physical_dispatcher(stock: MoETokenDispatcher, num_physical: int) -> MoETokenDispatcher:
    """A dispatcher of the same class and groups as ``stock``, over ``num_physical`` experts per rank.

    Shared experts that overlap with communication are handed over as well.
    """
    config = copy.copy(stock.config)
    config.num_moe_experts = stock.ep_size * num_physical
    first = stock.ep_group.rank() * num_physical
    groups = ProcessGroupCollection(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
    dispatcher = type(stock)(
        num_physical, list(range(first, first + num_physical)), config=config, pg_collection=groups
    )
    if stock.shared_experts is not None:
        dispatcher.set_shared_experts(stock.shared_experts)
    return dispatcher


def gather_loads(routing_map: Tensor, group: dist.ProcessGroup, *, label: str, timeout: float) -> Tensor:
    """[N, E] int32 tokens of every source rank of ``group`` for every expert, from this rank's ``routing_map`` [T, E].

    On a GPU the stream waits for it, not the host.

    Raises:
        TransferError: naming ``label``, when a rank dies or does not answer within ``timeout`` seconds.
    """
    own = routing_map.sum(dim=0, dtype=torch.int32)
    loads = own.new_empty(group.size() * len(own))
    work = dist.all_gather_into_tensor(loads, own, group=group, async_op=True)
    finish(work, loads, group, what="gathering the loads", label=label, timeout=timeout)
    return loads.view(group.size(), -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """Where the columns of a quota row lie, for one placement, on the device. All [C] int64.

    Args:
        expert: expert of the column; columns of one expert lie side by side.
        first: the first column of the same expert.
        physical: physical expert of the column, ``rank * P + slot``.
        num_physical: R * P.
    """

    expert: Tensor
    first: Tensor
    physical: Tensor
    num_physical: int

    @classmethod
    def of(cls, placement: Placement, device: torch.device) -> Columns:
        """One upload, which the host does not wait for; columns by expert, then rank, as in ``Quotas``."""
        expert, rank = np.nonzero(placement.holders)
        slot_of = np.zeros(placement.holders.shape, dtype=np.int64)
        held_on, slot = np.nonzero(placement.table != EMPTY)
        slot_of[placement.table[held_on, slot], held_on] = slot
        physical = rank * placement.slots_per_rank + slot_of[expert, rank]
        columns = torch.from_numpy(np.stack([expert, np.searchsorted(expert, expert), physical]))
        if device.type == "cuda":
            columns = columns.pin_memory()
        return cls(*columns.to(device, non_blocking=True).unbind(), num_physical=placement.table.size)


def to_physical(routing_map: Tensor, probs: Tensor, quotas: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """Send every token of this source to a holder of its expert.

    Args:
        routing_map: [T, E] bool.
        probs: [T, E] routing probabilities, differentiable.
        quotas: [C] int64, this source's tokens for each column; over an expert's columns they sum to its tokens.
        columns: where the holders' copies lie.

    Returns:
        [T, R * P] bool routing map and [T, R * P] probabilities over physical experts.
    """
    total = torch.cumsum(quotas, dim=0)
    before = total - quotas
    # a running sum that restarts with each expert
    begin = before - before[columns.first]
    end = begin + quotas
    # position of a token among those for its expert, from 1
    position = torch.cumsum(routing_map, dim=0, dtype=torch.int32)[:, columns.expert]  # [T, C]
    taken = routing_map[:, columns.expert] & (position > begin) & (position <= end)
    physical_map = routing_map.new_zeros(len(routing_map), columns.num_physical).index_copy_(1, columns.physical, taken)
    physical_probs = probs.new_zeros(len(probs), columns.num_physical).index_copy(
        1, columns.physical, probs[:, columns.expert] * taken
    )
    return physical_map, physical_probs
