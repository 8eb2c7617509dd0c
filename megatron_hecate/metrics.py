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
    """

    layer: str
    guests: int
    late: int
    bypassed: bool
    routed: float
    computed: float


def imbalance(load: np.ndarray, placement: Placement, world: World) -> float:
    """Largest over mean rank load when ``load`` [E] tokens are split over the holders; 1.0 without tokens."""
    total = int(load.sum())
    return largest_load(load, placement, world) * placement.num_ranks / total if total else 1.0


def layer_metrics(chunks: Iterable[Module]) -> list[LayerMetrics]:
    """Metrics of the last finished iteration of all FSSDP layers in these model chunks, wrapped by DDP or not.

    Read them between iterations, on any rank; nothing is communicated, and nothing is computed unless asked.
    """
    states = [m.fssdp for chunk in chunks for m in chunk.modules() if hasattr(m, "fssdp")]
    return [metrics for state in states if (metrics := state.metrics()) is not None]
