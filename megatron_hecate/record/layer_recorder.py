"""Per-iteration measurements of FSSDP's layers, for the record and the loggers.

Values of single ranks are summed together with the loads: no message is added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.device.lasting import lasting_tensors
from megatron_hecate.megatron.forward_pass import ForwardPass
from megatron_hecate.megatron.job_sizes import job_sizes, memory_sizes
from megatron_hecate.megatron.router_replay import has_replay
from megatron_hecate.megatron.training_state import num_microbatches
from megatron_hecate.plan import Placement
from megatron_hecate.plan.maxflow import balance
from megatron_hecate.record.expert_timer import ExpertTimer
from megatron_hecate.record.recorder import StageRecorder, describe_run
from megatron_hecate.record.run_folder import RunInfo
from megatron_hecate.record.stage_metrics import StageMetrics
from megatron_hecate.replicas.memory_estimate import ExpertMemory
from megatron_hecate.step.layer_state import LayerState
from megatron_hecate.step.token_counts import TokenCounts


class LayerRecorder:
    """Measurements of the layers of one pipeline stage, on one rank of their group.

    Args:
        states: states of the stage's layers.
        meter: measured times of copies and of the compute that hides copies.
        folder: folder of the record, if the configuration asks for one.
        collect: see `StageRecorder`.
        microbatches: returns the number of microbatches of the last iteration.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        meter: OverlapMeter,
        *,
        folder: str | None,
        collect: Callable[[], bool],
        microbatches: Callable[[], int],
    ) -> None:
        self._states = states
        self._meter = meter
        first = states[0]
        config = first.config
        world = first.world
        model = first.parts.layer.config
        # Microbatches with plans of their own: the record holds the one with most replicas.
        self._plans_often = has_replay(first.parts.layer) and not first.keeps_replicas
        # Measure the tokens that ranks compute and send. Equal on all ranks, since values are
        # summed.
        self.measures = config.record is not None or self._plans_often
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
        # `attach` converts the expert modules to be timed.
        self.timer: ExpertTimer | None = None
        if config.record is not None:
            on_gpu = next(first.parts.layer.experts.parameters()).is_cuda
            self.timer = ExpertTimer(len(states), self._rank, world.num_ranks, on_gpu=on_gpu)
        # Tokens per microbatch as routed; counted only for a record.
        self.counts = None if config.record is None else _token_counts(states)
        # Tokens computed on this rank by microbatch, [M, L], and forwards that were counted, [L].
        distinguished = 1 if self.counts is None else self.counts.distinguished
        self._computed = np.zeros((distinguished, len(states)), dtype=np.int64)
        self._forwards = [0] * len(states)
        # Tokens sent to other nodes, [L].
        self._crossing = np.zeros(len(states), dtype=np.int64)
        # Placements of the running iteration's microbatch with most replicas.
        self._most = [state.parts.homes_only for state in states]
        # Placements without and with late replicas of the iteration whose loads are being summed.
        self._placed: list[tuple[Placement, Placement]] = []
        info = _describe_stage(states)
        recorded = None if config.record is None else folder
        self.stage = StageRecorder(info, recorded, group=first.rerouter.sources, collect=collect)
        self._metrics = StageMetrics(states, info, microbatches)
        self._iteration = 0

    def begin(self) -> int:
        """Begin an iteration at its first tokens; return the length of what `take` is given."""
        self._iteration = self.stage.begin()
        length = self._num_counts if self.measures else 0
        if self.timer is not None:
            length += self.timer.length
        if self.counts is not None:
            length += self.counts.size_of_ranks
        return length

    @property
    def _num_counts(self) -> int:
        """Length of the token counts in `measured`, (N * M + 1) * L."""
        return len(self._elsewhere) * self._computed.size + len(self._crossing)

    def computed(self, layer: int, forward: ForwardPass, sent_tokens: Sequence[int] | None) -> None:
        """Count the tokens of one forward.

        Args:
            layer: index of the layer.
            forward: the forward, with the number of rows of the experts' input.
            sent_tokens: tokens that this rank sent to each rank, [N]; ``None`` if unknown.
        """
        microbatch = self._forwards[layer] % len(self._computed)
        self._computed[microbatch, layer] += forward.num_tokens
        self._forwards[layer] += 1
        replicas = forward.replicas if self._plans_often else None
        if (
            replicas is not None
            and replicas.placement.num_replicas > self._most[layer].num_replicas
        ):
            self._most[layer] = replicas.placement
        if self._crosses and sent_tokens is not None:
            self._crossing[layer] += np.asarray(sent_tokens)[self._elsewhere].sum()

    def measured(self) -> np.ndarray:
        """Return this rank's token counts since the last call, and reset the counters.

        Sums over the group are passed to `take`.

        Returns:
            [(N * M + 1) * L]: for each rank, microbatch and layer the computed tokens, which are 0
            except for this rank, and for each layer the tokens sent to other nodes. Then
            `ExpertTimer.take`, where experts are timed. int64; empty without measurements.
        """
        self._placed = [
            self._placements(state, fullest)
            for state, fullest in zip(self._states, self._most, strict=True)
        ]
        if not self.measures:
            return np.zeros(0, dtype=np.int64)
        computed = np.zeros((len(self._elsewhere), *self._computed.shape), dtype=np.int64)
        computed[self._rank] = self._computed
        numbers = [computed.ravel(), self._crossing]
        if self.timer is not None:
            numbers.append(self.timer.take())
        measured = np.concatenate(numbers)
        self._computed[:] = 0
        self._crossing[:] = 0
        self._forwards = [0] * len(self._forwards)
        self._most = [state.parts.homes_only for state in self._states]
        return measured

    def take(self, load: np.ndarray, measured: np.ndarray) -> None:
        """Record a complete iteration.

        Args:
            load: tokens per layer and expert, summed over the group, [L, E].
            measured: results of `measured`, then the tokens of home ranks by microbatch and layer,
                where they are counted ([N * M * L] in the order of `TokenCounts`); summed over the
                group.
        """
        placed = self._placed
        build = functools.partial(
            self._arrays, load, measured, placed, self._meter.window, self._meter.copy
        )
        if self.counts is None:
            # The arrays are built in another thread, and only if the iteration is logged.
            self.stage.log(
                self._iteration, lambda: self._metrics.of_iteration(load, placed, build())
            )
            return
        arrays = build()
        self.stage.take(
            self._iteration,
            arrays,
            lambda: self._metrics.of_iteration(load, placed, arrays),
            loads=arrays["rank_load"],
        )

    def _arrays(
        self,
        load: np.ndarray,
        measured: np.ndarray,
        placed: Sequence[tuple[Placement, Placement]],
        window: float | None,
        copy: float | None,
    ) -> dict[str, np.ndarray]:
        """Compute the arrays of `RunRecord` for one iteration.

        Args:
            load: see `take`.
            measured: see `take`.
            placed: placements of each layer without and with late replicas.
            window: seconds that hide copies, see `OverlapMeter`; ``None`` if not measured.
            copy: seconds of a copy; ``None`` if not measured.
        """
        config = self._states[0].config
        # The slots are the last columns. Layers may differ in the number of homes before.
        replica = [
            placement.table[:, placement.table.shape[1] - config.slots :] for _, placement in placed
        ]
        arrays: dict[str, Any] = {
            "load": load,
            "replica": np.stack(replica),
            "window": self._per_layer(window),
            "copy": self._per_layer(copy),
        }
        if config.rehome:
            arrays["home"] = np.stack([placement.home for _, placement in placed])
        if self.measures:
            arrays |= self._measured_arrays(load, measured[: self._num_counts], placed)
        if self.counts is not None and self.timer is not None:
            timed, rank_sums = np.split(measured[self._num_counts :], [self.timer.length])
            arrays |= self.timer.split(timed)
            arrays["peak"] = self.counts.fullest(rank_sums)
        return arrays

    @staticmethod
    def _placements(state: LayerState, fullest: Placement) -> tuple[Placement, Placement]:
        """Return the placements of an iteration without and with late replicas.

        Args:
            state: state of the layer.
            fullest: placement of the microbatch with most replicas.
        """
        if fullest.num_replicas > state.placement.num_replicas:
            return fullest, fullest
        return state.planned, state.placement

    def _per_layer(self, number: float | None) -> np.ndarray:
        """Repeat a measured number for each layer, [L]; NaN before the first measurement."""
        if number is None:
            number = np.nan
        return np.full(len(self._states), number)

    def _measured_arrays(
        self,
        load: np.ndarray,
        measured: np.ndarray,
        placed: Sequence[tuple[Placement, Placement]],
    ) -> dict[str, np.ndarray]:
        """Compute the arrays of `RunRecord` that need the measurements of all ranks.

        Args:
            load: tokens per layer and expert, [L, E].
            measured: results of `measured`, summed over the group.
            placed: placements of each layer without and with late replicas.
        """
        computed, crossing = np.split(measured, [-len(self._crossing)])
        # by rank, microbatch and layer, [N, M, L]
        computed = computed.reshape(-1, *self._computed.shape) // self._per_rank
        arrays = {"rank_load": computed.sum(axis=1).T}
        if self.counts is not None and not self._padded:
            arrays["computed_peak"] = computed.max(axis=0).sum(axis=0)
        if self._padded:
            # Rows of the experts' input include padding, so the loads are those of exact quotas for
            # all microbatches together.
            balanced = []
            for (_, placement), layer_load in zip(placed, load, strict=True):
                total = placement.checked_load(layer_load[: placement.num_experts])
                balanced.append(balance(total, placement.table.copy(), 0, False).load)
            arrays["rank_load"] = np.stack(balanced)
        if self._crosses:
            arrays["crossing"] = crossing
        late = [(placement.holders & ~planned.holders).sum() for planned, placement in placed]
        arrays["late"] = np.array(late)
        return arrays


def _token_counts(states: Sequence[LayerState]) -> TokenCounts:
    """Allocate the counts of tokens per microbatch of the layers with these ``states``."""
    with lasting_tensors():
        return TokenCounts(
            [state.parts.homes_only.num_experts for state in states],
            states[0].world.num_ranks,
            microbatches=num_microbatches(),
            device=device_of_rank(),
        )


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


def _describe_stage(states: Sequence[LayerState]) -> RunInfo:
    """Describe the run for the header of this stage.

    Args:
        states: states of the stage's layers.
    """
    first = states[0]
    config = first.config
    world = first.world
    model = first.parts.layer.config
    buffers = tuple(state.parts.buffer(config.slots) for state in states)
    transport_bytes = first.transport.extra_bytes(buffers) if config.slots else 0
    memory = ExpertMemory.estimate(buffers, config.lifetime, transport_bytes=transport_bytes)
    return describe_run(
        "fssdp",
        [state.name for state in states],
        shape=first.shape(num_microbatches() or 1),
        speeds=world.speeds,
        memory=memory_sizes(memory, model, [state.chunk for state in states], buffers[0].dtype),
        num_experts=max(state.parts.homes_only.num_experts for state in states),
        ranks=world.num_ranks,
        node=tuple(world.node),
        top_k=model.moe_router_topk,
        slots=config.slots,
        job=job_sizes(model),
        lifetime=config.lifetime,
        transport=config.transport,
    )
