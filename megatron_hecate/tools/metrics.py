"""What FSSDP did in the last iteration, layer by layer: see whether replicas pay, and when they were left out.

`LayerMetrics` are for Python; `step_metrics` and `summarize` make what is logged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

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


def step_metrics(
    load: np.ndarray, routed: np.ndarray, computed: np.ndarray, *, token_ms: float
) -> dict[str, np.ndarray]:
    """What layers did in an iteration, [L] each, by the names they are logged under (docs/observe.md).

    Args:
        load: [L, E] tokens per expert.
        routed: [L, N] tokens per rank without replicas.
        computed: [L, N] tokens that each rank computed; or [L, 1], the largest of them.
        token_ms: milliseconds of one token in one expert, forward and backward, by the speeds in use.
    """
    tokens = load.sum(axis=1)
    rank, expert = tokens / routed.shape[1], tokens / load.shape[1]
    fullest, without = computed.max(axis=1), routed.max(axis=1)
    some = tokens > 0
    return {
        "overload_factor": np.divide(fullest, rank, out=np.ones(len(load)), where=some),
        "max_vio": np.divide(load.max(axis=1), expert, out=np.ones(len(load)), where=some) - 1,
        "dead_experts": (load == 0).sum(axis=1),
        "ms_lost_to_imbalance": np.maximum(fullest - rank, 0) * token_ms,
        "ms_recovered": (without - fullest) * token_ms,
        **({"rank_load": computed} if computed.shape == routed.shape else {}),
    }


def summarize(layers: Sequence[str], values: Mapping[str, np.ndarray], *, per_layer: bool) -> dict[str, float]:
    """One number per name, and one per layer where asked for, under Megatron's names where it has one.

    Args:
        layers: [L] names.
        values: what `step_metrics` gave, and more of that kind, for all layers.
        per_layer: whether each layer is logged too, numbered from 0 as by Megatron.
    """
    factor = values["overload_factor"]
    found = {"moe/avg_overload_factor": factor.mean(), "moe/max_overload_factor": factor.max()}
    if "rank_load" in values and (total := values["rank_load"].sum(axis=0)).any():
        found["moe/max_cum_overload_factor"] = total.max() / total.mean()
    for name, of_layers in values.items():
        group = "moe" if name in ("overload_factor", "max_vio", "dead_experts") else "fssdp"
        if name not in ("overload_factor", "rank_load"):
            averaged = name in ("max_vio", "hidden_share")
            found[f"{group}/{name}"] = of_layers.mean() if averaged else of_layers.sum()
        if per_layer and name != "rank_load":
            numbered = [(*layer.rpartition(" ")[::2], value) for layer, value in zip(layers, of_layers, strict=True)]
            found |= {f"{group}/{name}_{of}_{int(n) - 1}".replace(" ", "_"): value for of, n, value in numbered}
    return {name: float(value) for name, value in found.items()}
