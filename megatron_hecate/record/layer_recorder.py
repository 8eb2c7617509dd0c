"""Per-iteration measurements of FSSDP's layers, for the record and the loggers.

Values of single ranks are summed together with the loads: no message is added. Letters in shapes:
M microbatches that are distinguished, L layers, E experts, N ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.device.autograd import lasting_tensors
from megatron_hecate.megatron.dispatcher import rank_budget
from megatron_hecate.megatron.events import StepEvents
from megatron_hecate.megatron.forward_pass import ForwardPass
from megatron_hecate.megatron.training_state import num_microbatches
from megatron_hecate.plan import Placement
from megatron_hecate.plan.maxflow import balance
from megatron_hecate.record.job_sizes import stage_info
from megatron_hecate.record.recorder import Columns, StageRecorder
from megatron_hecate.record.token_counts import TokenCounts, over_mean, sum_fullest
from megatron_hecate.routing.quotas import NOTED
from megatron_hecate.step.clock import Clock
from megatron_hecate.step.layer_state import LayerState


class LayerRecorder(StepEvents):
    """Measurements of the layers of one pipeline stage, on one rank of their group.

    Args:
        states: states of the stage's layers.
        meter: measured time of the compute that hides copies.
        clock: clock of the model.
        folder: folder of the record, if the configuration asks for one.
        collect: see `StageRecorder`.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        meter: OverlapMeter,
        clock: Clock,
        *,
        folder: str | None,
        collect: Callable[[], bool],
    ) -> None:
        self._states = states
        self._meter = meter
        self.clock = clock
        first = states[0]
        world = first.world
        model = first.parts.layer.config
        self._rank = first.group.rank()
        # Expert-tensor-parallel ranks compute, and therefore count, the same tokens.
        self._per_rank = first.rerouter.sources.size() // world.num_ranks
        # True for ranks on other nodes than this one, [N].
        self._elsewhere = world.node_index != world.node_index[self._rank]
        # Padding to capacity would count as tokens that cross nodes.
        self._crosses = (
            hasattr(first.stock_dispatcher, "input_splits")
            and not model.moe_pad_expert_input_to_capacity
        )
        self._padded = _pads_experts_input(model)
        experts = [state.parts.homes_only.num_experts for state in states]
        self.counts = _token_counts(states, experts)
        # Computed tokens by rank, microbatch and layer, [N, M, L]; 0 except for this rank.
        distinguished = 1 if self.counts is None else self.counts.distinguished
        self._computed = np.zeros((world.num_ranks, distinguished, len(states)), dtype=np.int64)
        # Microbatches whose quotas were not computed, because they had no replicas, [M, L].
        self._plain = np.zeros((distinguished, len(states)), dtype=bool)
        # Tokens sent to other nodes, [L].
        self._crossing = np.zeros(len(states), dtype=np.int64)
        # Placements without and with late replicas of the iteration whose loads are being summed,
        # and its `_plain`.
        self._placed: list[tuple[Placement, Placement]] = []
        self._summed_plain = self._plain
        # Number of the last iteration that has begun.
        self._number = 0
        info = stage_info(
            model,
            layers=[state.name for state in states],
            experts=experts,
            world=world,
            shape=first.shape(num_microbatches() or 1),
            mode="fssdp",
            slots=first.config.slots,
            lifetime=first.config.lifetime,
            transport=first.config.transport,
        )
        self.stage = StageRecorder(
            info,
            folder if self.counts is not None else None,
            group=first.rerouter.sources,
            experts=experts,
            collect=collect,
        )

    def iteration_begins(self, iteration: int) -> None:
        # Called after the prefetcher, which has collected the loads of the iteration before.
        self._number = iteration
        # DDP has made main gradients since the hook.
        self.stage.info.shape["grad_bytes"] = self._states[0].shape(1).grad_bytes
        if self.counts is not None:
            # Evaluation may have noted loads since the sum.
            self.counts.noted.zero_()

    @property
    def _num_counts(self) -> int:
        """Length of the token counts in `measured`, (N * M + 1) * L."""
        return self._computed.size + self._crossing.size

    def computed(self, layer: int, forward: ForwardPass, sent_tokens: Sequence[int] | None) -> None:
        """Count the tokens of one forward.

        Args:
            layer: index of the layer.
            forward: the forward, with the number of rows of the experts' input.
            sent_tokens: tokens that this rank sent to each rank, [N]; ``None`` if unknown.
        """
        assert self.counts is not None
        microbatch = self.counts.microbatch(layer)
        self._computed[self._rank, microbatch, layer] += forward.num_tokens
        self._plain[microbatch, layer] |= forward.replicas is None
        if self._crosses and sent_tokens is not None:
            self._crossing[layer] += np.asarray(sent_tokens)[self._elsewhere].sum()

    def measured(self) -> np.ndarray:
        """Return this rank's token counts since the last call, and reset the counters.

        Sums over the group are passed to `take`.

        Returns:
            [(N * M + 1) * L]: for each rank, microbatch and layer the computed tokens, which are 0
            except for this rank, and for each layer the tokens sent to other nodes. int64; empty
            without measurements.
        """
        self._placed = [(state.current.planned, state.placement) for state in self._states]
        if self.counts is None:
            return np.zeros(0, dtype=np.int64)
        measured = np.concatenate([self._computed.ravel(), self._crossing])
        self._computed[:] = 0
        self._crossing[:] = 0
        self._summed_plain, self._plain = self._plain, np.zeros_like(self._plain)
        return measured

    def take(self, load: np.ndarray, measured: np.ndarray) -> None:
        """Record a complete iteration.

        Args:
            load: tokens per layer and expert, summed over the group, [L, E].
            measured: results of `measured`, then what follows the tokens of experts in
                `TokenCounts.take`, where they are counted; summed over the group.
        """
        window = np.nan if self._meter.window is None else self._meter.window
        noted = self._placed, self._summed_plain
        build = functools.partial(self._columns, load, measured, noted, window)
        self.stage.take(self._number, build)

    def _columns(
        self,
        load: np.ndarray,
        measured: np.ndarray,
        noted: tuple[Sequence[tuple[Placement, Placement]], np.ndarray],
        window: float,
    ) -> Columns:
        """Compute the columns of one iteration.

        Args:
            load: see `take`.
            measured: see `take`.
            noted: placements of each layer without and with late replicas; and microbatches without
                quotas, [M, L].
            window: seconds that hide copies; NaN if not measured.
        """
        config = self._states[0].config
        placed, plain = noted
        placements = [placement for _, placement in placed]
        columns: dict[str, Any] = {
            "load": load,
            # In the table of a placement the slots of replicas follow the homes.
            "replica": np.stack([p.table[:, p.num_experts // p.num_ranks :] for p in placements]),
            "late": np.array([(p.holders & ~planned.holders).sum() for planned, p in placed]),
            "window": np.full(len(placements), window),
        }
        if config.rehome:
            columns["home"] = np.stack([placement.home for placement in placements])
        if self.counts is not None:
            counts, home_sums = np.split(measured, [self._num_counts])
            computed, crossing = np.split(counts, [-len(self._crossing)])
            computed = computed.reshape(self._computed.shape) // self._per_rank
            homes, noted_loads = self.counts.split_homes(home_sums)
            columns["peak"] = sum_fullest(homes)
            # Every rank has noted the same.
            own, stock = noted_loads.T / (NOTED * len(computed) * self._per_rank)
            columns["stock_factor"] = np.maximum(stock, over_mean(homes).max(axis=0))
            # Without replicas a rank's load is stock's, unless homes have moved.
            counted = over_mean(homes) * (plain & (not config.rehome))
            if not self._padded:
                counted = over_mean(computed.transpose(1, 2, 0))
            columns["factor"] = np.maximum(own, counted.max(axis=0))
            if self._crosses:
                columns["crossing"] = crossing
        if self.counts is not None and not self._padded:
            columns["rank_load"] = computed.sum(axis=1).T
            columns["computed_peak"] = computed.max(axis=0).sum(axis=0)
        else:
            # Not counted, or rows of the experts' input include padding: the loads are the loads of
            # exact quotas for all microbatches together.
            columns["rank_load"] = np.stack(list(map(_balanced, load, placements)))
        if self.counts is not None:
            # For homes that have moved, where only loads of the iteration are known.
            columns["factor"] = np.maximum(columns["factor"], over_mean(columns["rank_load"]))
        return columns


def _token_counts(states: Sequence[LayerState], experts: Sequence[int]) -> TokenCounts | None:
    """Make the counts of tokens per microbatch as routed; ``None`` without record and budget.

    With them the tokens that ranks compute and send are counted, too: on all ranks, because values
    are summed.

    Args:
        states: states of the stage's layers.
        experts: number of experts of each layer, [L].
    """
    first = states[0]
    if first.config.record is None and rank_budget(first.stock_dispatcher) is None:
        return None
    with lasting_tensors():
        counts = TokenCounts(experts, first.world.num_ranks, device_of_rank())
        for state, noted in zip(states, counts.noted, strict=True):
            state.rerouter.tables.noted = noted
    return counts


def _balanced(load: np.ndarray, placement: Placement) -> np.ndarray:
    """Return the tokens of each rank by exact quotas, [N], for the ``load`` [E] of a layer."""
    total = np.ascontiguousarray(load[: placement.num_experts], dtype=np.int64)
    return balance(total, placement.table.copy(), 0, False).load


def _pads_experts_input(model: Any) -> bool:
    """Return True if some rows of the experts' input are padding.

    Args:
        model: Megatron's TransformerConfig.
    """
    backend = None
    if model.moe_token_dispatcher_type == "flex":
        backend = model.moe_flex_dispatcher_backend
    # Since Megatron 0.20.
    grouped = getattr(model, "moe_use_grouped_tensor", False)
    quantized = model.fp8 or getattr(model, "fp4", None)
    aligns = backend is not None and (grouped or (backend == "hybridep" and quantized))
    budget = backend == "ncclep" or getattr(model, "moe_expert_rank_capacity_factor", None)
    pads = model.moe_pad_expert_input_to_capacity or model.moe_router_padding_for_quantization
    return bool(aligns or budget or pads)
