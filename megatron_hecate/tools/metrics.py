"""What FSSDP did in the last iteration, layer by layer: see whether replicas pay, and when they were left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from torch.nn import Module

from megatron_hecate.plan import Placement, largest_load


@dataclasses.dataclass(frozen=True)
class LayerMetrics:
    """One layer in one iteration; the same on every rank of its group.

    Args:
        layer: its name.
        replicas: of all ranks together.
        late: of those, fetched after the gate.
        bypassed: whether copies were judged not to pay: the layer ran Megatron's own code.
        routed: largest rank load over mean rank load as the router left it, every token at its expert's home.
        computed: the same with these replicas and exact quotas. Over all microbatches together, so slightly below what
            single microbatches saw.
        routed_tokens: largest rank load as the router left it, in tokens (one that goes to k experts counts k times) of
            all microbatches together. The expert activations of a microbatch grow with its part of this.
        computed_tokens: the same with these replicas: what bounds expert activations under FSSDP.
    """

    layer: str
    replicas: int
    late: int
    bypassed: bool
    routed: float
    computed: float
    routed_tokens: int
    computed_tokens: int

    @classmethod
    def from_load(cls, layer: str, load: np.ndarray, *, planned: Placement, placement: Placement) -> LayerMetrics:
        """From the ``load`` [E] of an iteration, and its placements before and after the gate."""
        routed, computed = (largest_load(load, p) for p in (placement.homes_only, placement))
        mean = int(load.sum()) / placement.num_ranks
        has_slots = placement.table.size > placement.num_experts
        return cls(
            layer=layer,
            replicas=placement.num_replicas,
            late=int((placement.holders & ~planned.holders).sum()),
            bypassed=has_slots and not placement.num_replicas,
            routed=routed / mean if mean else 1.0,
            computed=computed / mean if mean else 1.0,
            routed_tokens=int(routed),
            computed_tokens=int(computed),
        )


def layer_metrics(chunks: Iterable[Module]) -> list[LayerMetrics]:
    """Metrics of the last finished iteration of all FSSDP layers in these model chunks, wrapped by DDP or not.

    Read them between iterations, on any rank; nothing is communicated, and nothing is computed unless asked.
    """
    metrics = []
    for layer in (module for chunk in chunks for module in chunk.modules() if hasattr(module, "fssdp")):
        monitor, state = layer.prefetcher.monitor, layer.fssdp
        monitor.collect()
        if monitor.history.last is not None:
            load = monitor.history.last[state.index, : state.placement.num_experts]
            of_layer = LayerMetrics.from_load(state.name, load, planned=state.planned, placement=state.placement)
            metrics.append(of_layer)
    return metrics
