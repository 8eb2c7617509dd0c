"""What FSSDP did in the last iteration, layer by layer: see whether replicas pay, and when they were left out.

`LayerMetrics` are for Python; `step_metrics` and `summarize` make what is logged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
    def from_load(
        cls, layer: str, load: np.ndarray, *, planned: Placement, placement: Placement
    ) -> LayerMetrics:
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
    for layer in (
        module for chunk in chunks for module in chunk.modules() if hasattr(module, "fssdp")
    ):
        monitor, state = layer.prefetcher.monitor, layer.fssdp
        monitor.collect()
        if monitor.history.last is not None:
            load = monitor.history.last[state.index, : state.placement.num_experts]
            of_layer = LayerMetrics.from_load(
                state.name, load, planned=state.planned, placement=state.placement
            )
            metrics.append(of_layer)
    return metrics


def step_metrics(
    load: Sequence[np.ndarray],
    routed: np.ndarray,
    computed: np.ndarray,
    *,
    token_ms: float,
    price_ms: Any = 0.0,
) -> dict[str, np.ndarray]:
    """What the layers of a stage did in an iteration, [L] each, by the names they are logged under (docs/observe.md).

    Args:
        load: of each layer, tokens per expert of its own.
        routed: [L, N] tokens per rank without replicas.
        computed: [L, N] tokens that each rank computed; or [L, 1], the largest of them.
        token_ms: milliseconds of one token in one expert, forward and backward, by the speeds in use.
        price_ms: [L] what replicas cost (`Figures.price_ms`).
    """
    tokens = np.array([of.sum() for of in load])
    rank, expert = tokens / routed.shape[1], tokens / [len(of) for of in load]
    fullest, without = computed.max(axis=1), routed.max(axis=1)
    some, total = tokens > 0, computed.sum(axis=0)
    measured = computed.shape == routed.shape and total.any()
    return {
        "overload_factor": np.divide(fullest, rank, out=np.ones(len(load)), where=some),
        "max_vio": np.divide([of.max() for of in load], expert, out=np.ones(len(load)), where=some)
        - 1,
        "dead_experts": np.array([(of == 0).sum() for of in load]),
        "ms_lost_to_imbalance": np.maximum(fullest - rank, 0) * token_ms,
        "ms_recovered_gross": (without - fullest) * token_ms,
        "ms_recovered": (without - fullest) * token_ms - price_ms,
        **(
            {"cum_overload_factor": np.full(len(load), total.max() / total.mean())}
            if measured
            else {}
        ),
    }


def summarize(
    layers: Sequence[str], values: Mapping[str, np.ndarray], *, per_layer: bool
) -> dict[str, float]:
    """One number per name, and one per layer where asked for, under Megatron's names where it has one.

    Args:
        layers: [L] names.
        values: [L] what `step_metrics` gave, and more of that kind, of all stages, one after another; NaN is left out.
        per_layer: whether each layer is logged too, numbered from 0 as by Megatron.
    """
    factor = values["overload_factor"]
    found = {"moe/avg_overload_factor": factor.mean(), "moe/max_overload_factor": factor.max()}
    if (of_stages := values.get("cum_overload_factor")) is not None:
        found["moe/max_cum_overload_factor"] = of_stages.max()
    for name, of_layers in (
        (name, of_layers) for name, of_layers in values.items() if of_layers is not of_stages
    ):
        group = "moe" if name in ("overload_factor", "max_vio", "dead_experts") else "fssdp"
        if name != "overload_factor":
            known = of_layers[~np.isnan(of_layers)]
            averaged = name in ("max_vio", "hidden_share")
            found |= (
                {f"{group}/{name}": known.mean() if averaged else known.sum()} if len(known) else {}
            )
        if per_layer:
            numbered = [
                (*layer.rpartition(" ")[::2], value)
                for layer, value in zip(layers, of_layers, strict=True)
            ]
            found |= {
                f"{group}/{name}_{of}_{int(n) - 1}".replace(" ", "_"): value
                for of, n, value in numbered
            }
    return {name: float(value) for name, value in found.items() if not np.isnan(value)}
