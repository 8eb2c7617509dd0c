"""Megatron's token dispatchers over physical experts."""

from __future__ import annotations

import copy

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)

_KNOWN = (MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher)


def physical_dispatcher(stock: MoETokenDispatcher, num_physical: int) -> MoETokenDispatcher:
    """Build a dispatcher like ``stock`` over ``num_physical`` experts per rank.

    It has the class and the groups of ``stock``, and gets the shared experts that overlap with
    communication.

    Raises:
        TypeError: for a dispatcher of a class that was not tested with replicas.
    """
    if not isinstance(stock, _KNOWN):
        known = ", ".join(dispatcher.__name__ for dispatcher in _KNOWN)
        raise TypeError(
            f"the token dispatcher is a {type(stock).__name__}; FSSDP knows {known} "
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
    dispatcher = type(stock)(
        num_physical, list(range(first, first + num_physical)), config=config, pg_collection=groups
    )
    if stock.shared_experts is not None:
        dispatcher.set_shared_experts(stock.shared_experts)
    return dispatcher
