"""What FSSDP did in the last iteration, layer by layer: see whether guests pay, and when they were left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from torch.nn import Module

from megatron_hecate.plan import Placement, World, largest_load


@dataclasses.dataclass(frozen=True)
class LayerMetrics:
    """One layer in one iteration; the same on every rank of its group.

    Args:
        layer: its name.
        guests: guests of all ranks together.
        late: of those, fetched after the gate.
        bypassed: whether copies were judged not to pay: the layer ran Megatron's own code.
        routed: largest rank load over mean rank load as the router left it, every token at its expert's home.
        computed: the same with these guests and exact quotas. Over all microbatches together, so slightly below what
            single microbatches saw.
        routed_tokens: largest rank load as the router left it, in tokens (one that goes to k experts counts k times) of
            all microbatches together. The expert activations of a microbatch grow with its part of this.
        most_tokens: the same with these guests: what bounds expert activations under FSSDP.
    """

    layer: str
    guests: int
    late: int
    bypassed: bool
    routed: float
    computed: float
    routed_tokens: int
    most_tokens: int

    @classmethod
    def of(
        cls, layer: str, load: np.ndarray, tier1: Placement, placement: Placement, world: World, *, bypassed: bool
    ) -> LayerMetrics:
        """From the ``load`` [E] of an iteration, and the guests before (``tier1``) and after its gate."""
        routed, most = (largest_load(load, p, world) for p in (placement.without_guests, placement))
        mean = int(load.sum()) / world.num_ranks
        return cls(
            layer=layer,
            guests=placement.num_guests,
            late=int((placement.holders & ~tier1.holders).sum()),
            bypassed=bypassed,
            routed=routed / mean if mean else 1.0,
            computed=most / mean if mean else 1.0,
            routed_tokens=int(routed),
            most_tokens=int(most),
        )


def layer_metrics(chunks: Iterable[Module]) -> list[LayerMetrics]:
    """Metrics of the last finished iteration of all FSSDP layers in these model chunks, wrapped by DDP or not.

    Read them between iterations, on any rank; nothing is communicated, and nothing is computed unless asked.
    """
    states = [m.fssdp for chunk in chunks for m in chunk.modules() if hasattr(m, "fssdp")]
    return [metrics for state in states if (metrics := state.metrics()) is not None]
