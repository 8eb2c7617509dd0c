"""Parts of one converted layer, built before the layer itself is changed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.megatron.dispatcher import physical_dispatcher
from megatron_hecate.megatron.experts import PhysicalExperts
from megatron_hecate.megatron.foreign_code import check_layer
from megatron_hecate.plan import Placement


class LayerParts:
    """Parts that the conversion of one layer needs, built without a change to the layer.

    Args:
        layer: Megatron's layer.
        chunk: index of the layer's model chunk on this rank.
        slots: replica slots of each rank.
        passes: passes of one microbatch through the layer.

    Raises:
        TypeError, ValueError: if the layer cannot be converted.
    """

    def __init__(self, layer: MoELayer, *, chunk: int, slots: int, passes: int) -> None:
        check_layer(layer)
        self.layer = layer
        self.chunk = chunk
        self.passes = passes
        # As built by Megatron.
        self.homes_only = Placement.initial(
            layer.config.num_moe_experts, layer.ep_group.size(), num_slots=slots
        )
        num_physical = self.homes_only.slots_per_rank
        self.physical_dispatcher = physical_dispatcher(layer.token_dispatcher, num_physical)
        self.experts = PhysicalExperts(layer.experts, num_physical)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the FSSDP group, by their numbers in the job."""
        return tuple(dist.get_process_group_ranks(self.layer.ep_group))

    def buffer(self, slots: int, dtype: torch.dtype | None = None) -> LayerBuffer:
        """Return the sizes of a buffer for the layer's replicas.

        Args:
            slots: replica slots of this rank.
            dtype: dtype to which the parameters will be cast; ``None``: their current dtype.
        """
        stored_bytes = self.experts.chunk_bytes if self.experts.quantized else 0
        return LayerBuffer(
            slots,
            self.experts.layout.elements,
            dtype or self.experts.dtype,
            self.experts.num_homes,
            stored_bytes,
        )
