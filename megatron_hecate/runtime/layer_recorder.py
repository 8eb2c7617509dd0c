"""What FSSDP's layers did in an iteration, for the record and the loggers. What only single ranks know travels with the
loads: no message is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_hecate.adapter.training_state import num_microbatches
from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.plan import Placement
from megatron_hecate.runtime.layer_state import LayerState
from megatron_hecate.runtime.recorder import StageRecorder, Values, describe_run
from megatron_hecate.tools.metrics import LayerMetrics, step_metrics


class LayerRecorder:
    """Of one stage, on one rank of its group.

    Args:
        states: of its layers.
        meter: what is known of copies.
        collect: see `StageRecorder`.
    """

    def __init__(self, states: Sequence[LayerState], meter: OverlapMeter, *, collect: Callable[[], bool]) -> None:
        self._states, self._meter = states, meter
        first = states[0]
        config, world, model = first.config, first.world, first.parts.layer.config
        plans_often = not first.keeps_replicas and getattr(first.parts.layer.router, "router_replay", None) is not None
        self.measures = config.record is not None or plans_often  # what ranks compute and send: all ranks, or none
        self._rank, self._per_rank = first.group.rank(), first.rerouter.sources.size() // world.num_ranks
        self._elsewhere = world.node_index != world.node_index[self._rank]  # [N] whether on another node than this
        self._crosses = hasattr(first.stock_dispatcher, "input_splits") and not model.moe_pad_expert_input_to_capacity
        self._tokens = np.zeros((2, len(states)), dtype=np.int64)  # computed here, sent to other nodes
        info = describe_run(
            "fssdp",
            [state.name for state in states],
            shape=first.shape(num_microbatches() or 1),
            speeds=world.speeds,
            num_experts=max(state.parts.homes_only.num_experts for state in states),
            ranks=world.num_ranks,
            node=tuple(world.node),
            top_k=model.moe_router_topk,
            **{name: getattr(config, name) for name in ("slots", "lifetime", "transport", "overlap_degree")},
        )
        self.stage = StageRecorder(info, config.record, group=first.rerouter.sources, collect=collect)
        self._iteration = 0

    def begin(self) -> int:
        """An iteration's first tokens are counted; returns how many numbers `measured` will have."""
        self._iteration = self.stage.begin()
        return len(self.measured())

    def computed(self, layer: int, tokens: int, sent: Sequence[int] | None) -> None:
        """Its experts have computed ``tokens`` here; so many of this rank's were ``sent`` to each, if it is known."""
        self._tokens[0, layer] += tokens
        if self._crosses and sent is not None:
            self._tokens[1, layer] += np.asarray(sent)[self._elsewhere].sum()

    def measured(self) -> list[int]:
        """[(N + 1) * L] what this rank computed, in its place among ranks, and what it sent to other nodes, since the
        last call. Sums over the group go to `take`."""
        if not self.measures:
            return []
        numbers = np.zeros((len(self._elsewhere) + 1, len(self._states)), dtype=np.int64)
        numbers[self._rank], numbers[-1] = self._tokens
        self._tokens[:] = 0
        return numbers.ravel().tolist()

    def take(self, load: np.ndarray, measured: np.ndarray) -> None:
        """The iteration's ``load`` [L, E], and what ranks ``measured``, summed over the group."""
        placed = [(state.planned, state.placement) for state in self._states]
        arrays: dict[str, np.ndarray | float] = {}
        if self.measures:
            *rank_load, crossing = measured.reshape(-1, len(self._states))
            arrays = {"load": load, "rank_load": np.stack(rank_load, axis=1) // self._per_rank}
            arrays |= {"crossing": crossing} if self._crosses else {}
            slots = self._states[0].config.slots
            arrays["replica"] = np.stack([now.table[:, now.table.shape[1] - slots :] for _, now in placed])
            arrays["late"] = np.array([(now.holders & ~planned.holders).sum() for planned, now in placed])
            arrays["hidden"] = self._hidden(placed).mean()
        self.stage.take(self._iteration, arrays, lambda: self._values(load, placed, arrays))

    def _hidden(self, placed: Sequence[tuple[Placement, Placement]]) -> np.ndarray:
        """[L] share of the copies' time behind compute, by the times that were measured; NaN before they were."""
        if self._meter.window is None or not self._meter.copy:
            return np.full(len(placed), np.nan)
        most = np.array([now.is_replica.sum(axis=1).max(initial=0) for _, now in placed])
        return np.minimum(1.0, self._meter.window / self._meter.copy / np.maximum(most, 1))

    def _values(
        self, load: np.ndarray, placed: Sequence[tuple[Placement, Placement]], arrays: Mapping[str, Any]
    ) -> Values:
        states = zip(self._states, load, placed, strict=True)
        layers = [
            LayerMetrics.from_load(s.name, of[: p[1].num_experts], planned=p[0], placement=p[1]) for s, of, p in states
        ]
        homes = [p[0].home for p in placed]
        routed = np.stack(
            [np.bincount(h, of[: len(h)], len(self._elsewhere)) for h, of in zip(homes, load, strict=True)]
        )
        computed = arrays.get("rank_load", np.array([[layer.computed_tokens] for layer in layers]))
        shapes = [state.shape(num_microbatches() or 1) for state in self._states]
        replicas = np.array([layer.replicas for layer in layers])
        per_replica = [s.fetches * s.expert_bytes + s.returns * s.grad_bytes for s in shapes]
        hidden = self._hidden(placed)
        return {
            **step_metrics(load, routed, computed, token_ms=1e3 * shapes[0].token_seconds(self._states[0].world)),
            "replicas": replicas,
            "late_replicas": np.array([layer.late for layer in layers]),
            "bypassed_layers": np.array([layer.bypassed for layer in layers]),
            "copied_mib": replicas * per_replica / 2**20,
            **({"crossing_tokens": arrays["crossing"]} if "crossing" in arrays else {}),
            **({} if np.isnan(hidden).any() else {"hidden_share": hidden}),
        }
