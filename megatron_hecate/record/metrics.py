"""Metrics of an iteration per layer: imbalance with and without replicas, and bypassed layers.

`LayerMetrics` are for Python code; `step_metrics` and `summarize` compute the logged values.
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
    """Metrics of one layer in one iteration, equal on every rank of its group.

    Args:
        layer: name of the layer.
        replicas: number of replicas on all ranks together.
        late: number of replicas that were fetched after the gate.
        bypassed: True if copies would not pay, so the layer ran Megatron's own code.
        routed: largest rank load over mean rank load as routed, with every token at its expert's
            home.
        computed: the same ratio with these replicas and exact quotas. All microbatches are counted
            together, so it is slightly below the ratio of a single microbatch.
        routed_tokens: largest rank load as routed, in tokens (a token with k experts counts k
            times) of all microbatches together. The expert activations of a microbatch grow with
            its part of the number.
        computed_tokens: largest rank load with these replicas, in the same unit: the upper bound of
            expert activations under FSSDP.
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
        """Compute the metrics of one layer.

        Args:
            layer: name of the layer.
            load: tokens per expert of the iteration, [E].
            planned: placement before the gate.
            placement: placement after the gate, with late replicas.
        """
        routed = largest_load(load, placement.homes_only)
        computed = largest_load(load, placement)
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
    """Compute the metrics of all FSSDP layers for the last finished iteration.

    Call it between iterations, on any rank. It communicates nothing, and metrics that are never
    requested are never computed.

    Args:
        chunks: model chunks, wrapped by DDP or not.
    """
    metrics = []
    for chunk in chunks:
        for layer in chunk.modules():
            if not hasattr(layer, "fssdp"):
                continue
            monitor = layer.prefetcher.monitor
            state = layer.fssdp
            monitor.collect()
            if monitor.history.last is not None:
                load = monitor.history.last[state.index, : state.placement.num_experts]
                measured = LayerMetrics.from_load(
                    state.name, load, planned=state.planned, placement=state.placement
                )
                metrics.append(measured)
    return metrics


def step_metrics(
    load: Sequence[np.ndarray],
    routed: np.ndarray,
    computed: np.ndarray,
    *,
    token_ms: float,
    price_ms: Any = 0.0,
) -> dict[str, np.ndarray]:
    """Compute the metrics of one iteration and stage, [L] each, by logged name (docs/observe.md).

    Args:
        load: tokens per expert of each layer, L arrays [E of the layer].
        routed: tokens per rank without replicas, [L, N].
        computed: tokens computed by each rank, [L, N]; or the maximum over ranks, [L, 1].
        token_ms: time of one token in one expert, forward and backward, by the speeds in use, ms.
        price_ms: cost of replicas (`Figures.price_ms`), [L] ms.
    """
    num_layers = len(load)
    tokens = np.array([layer_load.sum() for layer_load in load])
    has_tokens = tokens > 0
    mean_of_ranks = tokens / routed.shape[1]
    mean_of_experts = tokens / [len(layer_load) for layer_load in load]
    fullest_expert = [layer_load.max() for layer_load in load]
    fullest = computed.max(axis=1)
    won_ms = (routed.max(axis=1) - fullest) * token_ms

    def ratio(values: Any, mean: np.ndarray) -> np.ndarray:
        return np.divide(values, mean, out=np.ones(num_layers), where=has_tokens)

    metrics = {
        "overload_factor": ratio(fullest, mean_of_ranks),
        "max_vio": ratio(fullest_expert, mean_of_experts) - 1,
        "dead_experts": np.array([(layer_load == 0).sum() for layer_load in load]),
        "ms_lost_to_imbalance": np.maximum(fullest - mean_of_ranks, 0) * token_ms,
        "ms_recovered_gross": won_ms,
        "ms_recovered": won_ms - price_ms,
    }
    # The load of all layers together needs every rank's part, not only the largest.
    total = computed.sum(axis=0)
    if computed.shape == routed.shape and total.any():
        metrics["cum_overload_factor"] = np.full(num_layers, total.max() / total.mean())
    return metrics


def summarize(
    layers: Sequence[str], values: Mapping[str, np.ndarray], *, per_layer: bool
) -> dict[str, float]:
    """Reduce metrics to one number per name, and optionally one per layer.

    Names are Megatron's where Megatron logs the metric, too.

    Args:
        layers: names of the layers of all stages, [L].
        values: results of `step_metrics` and further metrics by name, [L] each; NaN is skipped.
        per_layer: also log each layer, numbered from 0 as by Megatron.
    """
    factor = values["overload_factor"]
    scalars = {"moe/avg_overload_factor": factor.mean(), "moe/max_overload_factor": factor.max()}
    # One value per stage, repeated for its layers: neither a sum nor a layer's value has a meaning.
    stage_values = {
        "cum_overload_factor": "moe/max_cum_overload_factor",
        "slowest_rank": "fssdp/slowest_rank",
    }
    for name, layer_values in values.items():
        if name in stage_values:
            numbers = layer_values[~np.isnan(layer_values)]
            scalars[stage_values[name]] = numbers.max(initial=-np.inf) if len(numbers) else np.nan
            continue
        group = "moe" if name in ("overload_factor", "max_vio", "dead_experts") else "fssdp"
        if name != "overload_factor":
            numbers = layer_values[~np.isnan(layer_values)]
            if len(numbers):
                averaged = name in ("max_vio", "hidden_share")
                scalars[f"{group}/{name}"] = numbers.mean() if averaged else numbers.sum()
        if per_layer:
            for layer, value in zip(layers, layer_values, strict=True):
                kind, _, number = layer.rpartition(" ")
                scalars[f"{group}/{name}_{kind}_{int(number) - 1}".replace(" ", "_")] = value
    return {name: float(value) for name, value in scalars.items() if not np.isnan(value)}
