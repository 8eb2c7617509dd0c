"""Metrics of the layers of one pipeline stage for the loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_hecate.plan import Placement
from megatron_hecate.record.metrics import LayerMetrics, step_metrics
from megatron_hecate.record.prices import PricedRecord
from megatron_hecate.record.run_folder import RunInfo, RunRecord
from megatron_hecate.step.layer_state import LayerState


class StageMetrics:
    """Metrics of one stage's layers.

    Args:
        states: states of the stage's layers.
        info: header of the stage.
        microbatches: returns the number of microbatches of the last iteration.
    """

    def __init__(
        self, states: Sequence[LayerState], info: RunInfo, microbatches: Callable[[], int]
    ) -> None:
        self._states = states
        self._info = info
        self._microbatches = microbatches

    def of_iteration(
        self,
        load: np.ndarray,
        placed: Sequence[tuple[Placement, Placement]],
        arrays: Mapping[str, Any],
    ) -> dict[str, np.ndarray]:
        """Compute the metrics of an iteration for the loggers, [L] each by name.

        Args:
            load: tokens per layer and expert, [L, E].
            placed: placements of each layer without and with late replicas.
            arrays: recorded arrays.
        """
        layers = [
            LayerMetrics.from_load(
                state.name,
                layer_load[: placement.num_experts],
                planned=planned,
                placement=placement,
            )
            for state, layer_load, (planned, placement) in zip(
                self._states, load, placed, strict=True
            )
        ]
        own_loads, routed = self._loads_at_home(load)
        if "rank_load" in arrays:
            computed = arrays["rank_load"]
        else:
            computed = np.array([[layer.computed_tokens] for layer in layers])
        prices = self._prices(arrays)
        shapes = [state.shape(self._microbatches()) for state in self._states]
        values = step_metrics(
            own_loads,
            routed,
            computed,
            token_ms=1e3 * shapes[0].token_seconds(self._states[0].world),
            price_ms=prices.price_ms[0],
        )
        replicas = np.array([layer.replicas for layer in layers])
        bytes_per_replica = [
            shape.fetches * shape.expert_bytes + shape.returns * shape.grad_bytes
            for shape in shapes
        ]
        values["replicas"] = replicas
        values["late_replicas"] = np.array([layer.late for layer in layers])
        values["bypassed_layers"] = np.array([layer.bypassed for layer in layers])
        values["copied_mib"] = replicas * bytes_per_replica / 2**20
        if "crossing" in arrays:
            values["crossing_tokens"] = arrays["crossing"]
        copying = prices.copying_ms[0]
        # Modelled copies are left out: the share is logged as measured.
        is_measured = ~np.isnan(arrays["copy"]) & (copying > 0)
        no_share = np.full(len(is_measured), np.nan)
        values["hidden_share"] = np.divide(
            prices.hidden_ms[0], copying, out=no_share, where=is_measured
        )
        return values

    def _loads_at_home(self, load: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Sum the loads by home rank.

        Args:
            load: tokens per layer and expert, [L, E].

        Returns:
            Tokens per expert of each layer, L arrays [E of the layer]; and tokens per rank without
            replicas, [L, N].
        """
        own_loads: list[np.ndarray] = []
        routed: list[np.ndarray] = []
        for state, layer_load in zip(self._states, load, strict=True):
            homes = state.parts.homes_only.home
            # Rows of layers with fewer experts are padded.
            loads = layer_load[: len(homes)]
            own_loads.append(loads)
            routed.append(np.bincount(homes, loads, self._states[0].world.num_ranks))
        return own_loads, np.stack(routed)

    def _prices(self, arrays: Mapping[str, Any]) -> PricedRecord:
        """Price the replicas of a record with one iteration.

        Args:
            arrays: recorded arrays of the iteration.
        """
        names = ["load", "replica", "window", "copy"]
        if "home" in arrays:
            names.append("home")
        of_one = {name: arrays[name][None] for name in names}
        return PricedRecord(
            RunRecord(info=self._info, iteration=np.zeros(1), time=np.zeros(1), **of_one)
        )
