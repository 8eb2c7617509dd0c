"""Parts of one converted layer, built before the layer itself is changed."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.megatron.dispatcher import physical_dispatcher
from megatron_hecate.megatron.experts import PhysicalExperts
from megatron_hecate.megatron.foreign_code import check_layer
from megatron_hecate.plan import LayerShape, Placement
from megatron_hecate.replicas.buffers import LIFETIMES


@dataclasses.dataclass(frozen=True, eq=False)
class LayerParts:
    """Parts that the conversion of one layer needs, built without a change to the layer.

    Args:
        layer: Megatron's layer.
        chunk: index of the layer's model chunk on this rank.
        homes_only: placement without replicas, as built by Megatron.
        physical_dispatcher: dispatcher over homes and replica slots.
        experts: the layer's experts as physical experts.
        passes: passes of one microbatch through the layer.
    """

    layer: MoELayer
    chunk: int
    homes_only: Placement
    physical_dispatcher: MoETokenDispatcher
    experts: PhysicalExperts
    passes: int

    @classmethod
    def build(cls, layer: MoELayer, *, chunk: int, slots: int, passes: int) -> LayerParts:
        """Build the parts of ``layer``.

        Raises:
            TypeError, ValueError: if the layer cannot be converted.
        """
        check_layer(layer)
        homes_only = Placement.initial(
            layer.config.num_moe_experts, layer.ep_group.size(), num_slots=slots
        )
        return cls(
            layer=layer,
            chunk=chunk,
            homes_only=homes_only,
            physical_dispatcher=physical_dispatcher(
                layer.token_dispatcher, homes_only.slots_per_rank
            ),
            experts=PhysicalExperts(layer.experts, homes_only.slots_per_rank),
            passes=passes,
        )

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

    def shape(self, lifetime: str, *, microbatches: int, in_schedule: bool) -> LayerShape:
        """Return the layer's sizes for the cost model.

        Args:
            lifetime: lifetime of the replicas.
            microbatches: number of microbatches in an iteration.
            in_schedule: False if no schedule of Megatron runs the microbatches: replicas and their
                gradients are then transferred in each microbatch.
        """
        fetches = LIFETIMES[lifetime].fetches
        returns = LIFETIMES[lifetime].returns * self.passes
        if not in_schedule:
            fetches = max(1, fetches)
            returns = max(1, returns)
        model = self.layer.config
        # Width of a token as dispatched.
        token_width = getattr(model, "moe_latent_size", None) or model.hidden_size
        expert = self.experts.home(0)
        return LayerShape(
            expert_bytes=self.experts.chunk_bytes,
            # gradients are transferred in fp32
            grad_bytes=sum(p.numel() * max(4, p.element_size()) for p in expert),
            token_bytes=token_width * expert[0].element_size(),
            # a matrix costs 2 FLOPs per element and token
            token_flops=sum(2.0 * p.numel() for p in expert if p.dim() > 1),
            microbatches=microbatches * self.passes,
            fetches=max(1, fetches * microbatches),
            returns=max(1, returns * microbatches),
        )
