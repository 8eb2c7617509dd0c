"""Logical experts in, physical experts out: Megatron's own dispatcher does the rest.

The router speaks of E experts. Megatron's dispatcher is built once more over R x P *physical* experts, and each token's
choice of an expert becomes a choice of one of its holders, by quota: of this rank's tokens for an expert, in order, the
first so many go to the first holder, the next to the second.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megatron_hecate.collectives import finish
from megatron_hecate.plan import Placement, Quotas


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


def gather_loads(routing_map: Tensor, group: dist.ProcessGroup, *, label: str, timeout: float) -> np.ndarray:
    """[N, E] tokens of every source rank of ``group`` for every expert, from this rank's ``routing_map`` [T, E].

    Raises:
        TransferError: naming ``label``, when a rank dies or does not answer within ``timeout`` seconds.
    """
    own = routing_map.sum(dim=0)
    loads = own.new_empty(group.size() * len(own))
    work = dist.all_gather_into_tensor(loads, own, group=group, async_op=True)
    finish(work, loads, group, what="gathering the loads", label=label, timeout=timeout)
    return loads.view(group.size(), -1).cpu().numpy()


def to_physical(
    routing_map: Tensor, probs: Tensor, quotas: Quotas, placement: Placement, *, source: int
) -> tuple[Tensor, Tensor]:
    """Send every token of this source to a holder of its expert.

    Args:
        routing_map: [T, E] bool.
        probs: [T, E] routing probabilities, differentiable.
        quotas: who serves how many of whose tokens.
        placement: where the holders' copies lie.
        source: this rank's row in ``quotas.tokens``.

    Returns:
        [T, R * P] bool routing map and [T, R * P] probabilities over physical experts.
    """
    device = routing_map.device
    slot = [placement.slot_of(e, r) for e, r in zip(quotas.expert.tolist(), quotas.rank.tolist(), strict=True)]
    physical = torch.from_numpy(quotas.rank * placement.slots_per_rank + slot).to(device)  # [C]
    expert = torch.from_numpy(quotas.expert).to(device)  # [C]
    tokens = quotas.tokens[source]
    # columns of one expert lie side by side: a running sum that restarts with each expert
    total = np.cumsum(tokens)
    first = np.searchsorted(quotas.expert, quotas.expert)  # [C] first column of the same expert
    before_expert = np.concatenate([[0], total])[first]
    end = torch.from_numpy(total - before_expert).to(device)
    begin = end - torch.from_numpy(tokens).to(device)

    position = (torch.cumsum(routing_map, dim=0) - 1)[:, expert]  # [T, C] of the token among those for its expert
    taken = routing_map[:, expert] & (position >= begin) & (position < end)
    num_physical = placement.num_ranks * placement.slots_per_rank
    physical_map = routing_map.new_zeros(len(routing_map), num_physical).index_copy_(1, physical, taken)
    physical_probs = probs.new_zeros(len(probs), num_physical).index_copy(1, physical, probs[:, expert] * taken)
    return physical_map, physical_probs
