"""Metrics of an iteration per layer: imbalance with and without replicas, and bypassed layers.

`LayerMetrics` are for Python code; `stage_metrics` and `summarize` compute the logged values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch.nn import Module

from megatron_hecate.plan import EMPTY, largest_load
from megatron_hecate.record.prices import PricedRecord
from megatron_hecate.record.run_folder import RunInfo, RunRecord


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


def layer_metrics(chunks: Iterable[Module]) -> list[LayerMetrics]:
    """Compute the metrics of all FSSDP layers for the last finished iteration.

    Call it between iterations, on any rank. It communicates nothing, and metrics that are never
    requested are never computed.

    Args:
        chunks: model chunks, wrapped by DDP or not.
    """
    metrics: list[LayerMetrics] = []
    for layer in chain.from_iterable(chunk.modules() for chunk in chunks):
        if not hasattr(layer, "fssdp"):
            continue
        monitor = layer.prefetcher.monitor
        monitor.collect()
        if monitor.history.last is None:
            continue
        state = layer.fssdp
        placement = state.placement
        load = monitor.history.last[state.index, : placement.num_experts]
        routed = largest_load(load, placement.homes_only)
        computed = largest_load(load, placement)
        mean = int(load.sum()) / placement.num_ranks
        metrics.append(
            LayerMetrics(
                layer=state.name,
                replicas=placement.num_replicas,
                late=int((placement.holders & ~state.current.planned.holders).sum()),
                bypassed=state.config.slots > 0 and not placement.num_replicas,
                routed=routed / mean if mean else 1.0,
                computed=computed / mean if mean else 1.0,
                routed_tokens=int(routed),
                computed_tokens=int(computed),
            )
        )
    return metrics


def stage_metrics(
    info: RunInfo, experts: Sequence[int], columns: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Compute the metrics of one iteration and stage, [L] each, by logged name (docs/observe.md).

    Args:
        info: properties of the stage.
        experts: number of experts of each layer, [L].
        columns: columns of the iteration, see `RunRecord`.
    """
    loads = [row[:number] for row, number in zip(columns["load"], experts, strict=True)]
    # Without rehoming, experts are at their original homes.
    homes = [np.arange(number) // (number // info.ranks) for number in experts]
    homes = list(columns.get("home", homes))
    routed = np.stack(
        [
            np.bincount(home[: len(load)], load, info.ranks)
            for home, load in zip(homes, loads, strict=True)
        ]
    )
    computed = columns.get("rank_load", routed)
    names = [name for name in ("load", "replica", "window", "home") if name in columns]
    row = {name: columns[name][None] for name in names}
    prices = PricedRecord(RunRecord(info=info, iteration=np.zeros(1), time=np.zeros(1), **row))
    metrics = step_metrics(
        loads, routed, computed, token_ms=prices.token_ms, price_ms=prices.price_ms[0]
    )
    names = {"factor": "rank_capacity_factor", "stock_factor": "stock_rank_capacity_factor"}
    metrics |= {name: columns[column] for column, name in names.items() if column in columns}
    if "replica" not in columns:
        return metrics
    shape = prices.shape
    replicas = (columns["replica"] != EMPTY).sum(axis=(1, 2))
    bytes_per_replica = shape.fetches * shape.expert_bytes + shape.returns * shape.grad_bytes
    copying = prices.copying_ms[0]
    # Only where the window before the experts has been measured.
    is_measured = ~np.isnan(columns["window"]) & (copying > 0)
    metrics |= {
        "replicas": replicas,
        "late_replicas": columns["late"],
        "bypassed_layers": (replicas == 0) & (info.slots > 0),
        "copied_mib": replicas * bytes_per_replica / 2**20,
        "hidden_share": np.divide(
            prices.hidden_ms[0], copying, out=np.full(len(copying), np.nan), where=is_measured
        ),
    }
    if "crossing" in columns:
        metrics["crossing_tokens"] = columns["crossing"]
    return metrics


def step_metrics(
    load: Sequence[np.ndarray],
    routed: np.ndarray,
    computed: np.ndarray,
    *,
    token_ms: float,
    price_ms: Any = 0.0,
) -> dict[str, np.ndarray]:
    """Compute the metrics that need tokens alone, [L] each, by logged name.

    Args:
        load: tokens per expert of each layer, L arrays [E of the layer].
        routed: tokens per rank without replicas, [L, N].
        computed: tokens computed by each rank, [L, N].
        token_ms: time of one token in one expert, forward and backward, by the speeds in use, ms.
        price_ms: cost of replicas (`PricedRecord.price_ms`), [L] ms.
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
    total = computed.sum(axis=0)
    if total.any():
        metrics["cum_overload_factor"] = np.full(num_layers, total.max() / total.mean())
    return metrics


# Logged name of a metric, and its reduction over layers. Names are Megatron's where Megatron logs
# the metric, too. A metric without an entry is summed.
REDUCTIONS: dict[str, tuple[str, Callable[[np.ndarray], Any]]] = {
    "overload_factor": ("moe/avg_overload_factor", np.mean),
    "max_vio": ("moe/max_vio", np.mean),
    "dead_experts": ("moe/dead_experts", np.sum),
    "hidden_share": ("fssdp/hidden_share", np.mean),
    "cum_overload_factor": ("moe/max_cum_overload_factor", np.max),
    "rank_capacity_factor": ("fssdp/rank_capacity_factor", np.max),
    "stock_rank_capacity_factor": ("fssdp/stock_rank_capacity_factor", np.max),
}
# One value per stage, repeated for its layers, so that no layer is logged.
OF_STAGES: str = "cum_overload_factor"


def summarize(
    layers: Sequence[str], values: Mapping[str, np.ndarray], *, per_layer: bool
) -> dict[str, float]:
    """Reduce metrics to one number per name, and optionally one per layer.

    Args:
        layers: names of the layers of all stages, [L].
        values: results of `stage_metrics` and further metrics by name, [L] each; NaN is skipped.
        per_layer: also log each layer, numbered from 0 as by Megatron.
    """
    scalars = {"moe/max_overload_factor": values["overload_factor"].max()}
    for name, layer_values in values.items():
        logged_name, reduce = REDUCTIONS.get(name, (f"fssdp/{name}", np.sum))
        numbers = layer_values[~np.isnan(layer_values)]
        if len(numbers):
            scalars[logged_name] = reduce(numbers)
        if per_layer and name != OF_STAGES:
            group = logged_name.partition("/")[0]
            for layer, value in zip(layers, layer_values, strict=True):
                kind, _, number = layer.rpartition(" ")
                scalars[f"{group}/{name}_{kind}_{int(number) - 1}".replace(" ", "_")] = value
    return {name: float(value) for name, value in scalars.items() if not np.isnan(value)}
