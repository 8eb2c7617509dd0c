"""What FSSDP's layers did in an iteration, for the record and the loggers. What only single ranks know travels with the
loads: no message is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.megatron.forward_pass import ForwardPass
from megatron_hecate.megatron.training_state import forwards_in_flight, num_microbatches
from megatron_hecate.plan import Placement
from megatron_hecate.plan.maxflow import balance
from megatron_hecate.record.analysis import Figures
from megatron_hecate.record.metrics import LayerMetrics, step_metrics
from megatron_hecate.record.recorder import StageRecorder, describe_run
from megatron_hecate.record.run_folder import RunRecord
from megatron_hecate.replicas.memory_estimate import RankExperts
from megatron_hecate.runtime.layer_state import LayerState


class LayerRecorder:
    """Of one stage, on one rank of its group.

    Args:
        states: of its layers.
        meter: what is known of copies.
        chunk_of: the model chunk of each layer.
        collect: see `StageRecorder`.
        microbatches: gives the number of microbatches of the last iteration.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        meter: OverlapMeter,
        *,
        chunk_of: Sequence[int],
        collect: Callable[[], bool],
        microbatches: Callable[[], int],
    ) -> None:
        self._states, self._meter = states, meter
        self._microbatches = microbatches
        first = states[0]
        config, world, model = first.config, first.world, first.parts.layer.config
        replays = getattr(first.parts.layer.router, "router_replay", None) is not None
        self._plans_often = replays and not first.keeps_replicas
        self.measures = (
            config.record is not None or self._plans_often
        )  # what ranks compute and send: all, or none
        self._rank, self._per_rank = (
            first.group.rank(),
            first.rerouter.sources.size() // world.num_ranks,
        )
        self._elsewhere = (
            world.node_index != world.node_index[self._rank]
        )  # [N] whether on another node than this
        self._crosses = (
            hasattr(first.stock_dispatcher, "input_splits")
            and not model.moe_pad_expert_input_to_capacity
        )
        backend = (
            model.moe_flex_dispatcher_backend if model.moe_token_dispatcher_type == "flex" else None
        )
        grouped = getattr(model, "moe_use_grouped_tensor", False)  # 0.20
        quantized = model.fp8 or getattr(model, "fp4", None)
        aligns = backend is not None and (grouped or (backend == "hybridep" and quantized))
        budget = backend == "ncclep" or getattr(model, "moe_expert_rank_capacity_factor", None)
        pads = model.moe_pad_expert_input_to_capacity or model.moe_router_padding_for_quantization
        self._padded = bool(
            aligns or budget or pads
        )  # some rows of the experts' input are no tokens
        self._tokens = np.zeros(
            (2, len(states)), dtype=np.int64
        )  # computed here, sent to other nodes
        # of the running iteration and of the one that is summed: the placement of the microbatch with most replicas
        self._most, self._most_then = (
            [state.parts.homes_only for state in states] for _ in range(2)
        )
        buffers = tuple(state.parts.buffer(config.slots) for state in states)
        experts = RankExperts.with_adam(
            buffers,
            in_flight=forwards_in_flight(model, chunk_of),
            transport_bytes=first.transport.extra_bytes(buffers) if config.slots else 0,
        )
        info = describe_run(
            "fssdp",
            [state.name for state in states],
            shape=first.shape(num_microbatches() or 1),
            speeds=world.speeds,
            memory=experts.for_record(model, config.lifetime),
            num_experts=max(state.parts.homes_only.num_experts for state in states),
            ranks=world.num_ranks,
            node=tuple(world.node),
            top_k=model.moe_router_topk,
            **{
                name: getattr(config, name)
                for name in ("slots", "lifetime", "transport", "overlap_degree")
            },
        )
        self.stage = StageRecorder(
            info, config.record, group=first.rerouter.sources, collect=collect
        )
        self._iteration = 0

    def begin(self) -> int:
        """An iteration's first tokens are counted; returns how many numbers `measured` will have."""
        self._iteration = self.stage.begin()
        return len(self.measured())

    def computed(self, layer: int, forward: ForwardPass, sent: Sequence[int] | None) -> None:
        """Note one ``forward`` of ``layer``; so many of this rank's tokens were ``sent`` to each rank, if known."""
        self._tokens[0, layer] += forward.num_tokens
        replicas = forward.replicas if self._plans_often else None
        if (
            replicas is not None
            and replicas.placement.num_replicas > self._most[layer].num_replicas
        ):
            self._most[layer] = replicas.placement
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
        self._most_then, self._most = self._most, [state.parts.homes_only for state in self._states]
        return numbers.ravel().tolist()

    def take(self, load: np.ndarray, measured: np.ndarray) -> None:
        """The iteration's ``load`` [L, E], and what ranks ``measured``, summed over the group."""
        placed = [
            max(
                (state.planned, state.placement),
                (most, most),
                key=lambda pair: pair[1].num_replicas,
            )
            for state, most in zip(self._states, self._most_then, strict=True)
        ]
        slots, numbers = self._states[0].config.slots, (self._meter.window, self._meter.copy)
        window, copy = (
            np.full(len(placed), np.nan if number is None else number) for number in numbers
        )
        replica = np.stack([now.table[:, now.table.shape[1] - slots :] for _, now in placed])
        arrays: dict[str, Any] = {"load": load, "replica": replica, "window": window, "copy": copy}
        if self._states[0].config.rehome:
            arrays["home"] = np.stack([now.home for _, now in placed])
        if self.measures:
            *rank_load, crossing = measured.reshape(-1, len(self._states))
            arrays["rank_load"] = np.stack(rank_load, axis=1) // self._per_rank
            if self._padded:  # what quotas make of all microbatches together
                pairs = [
                    (now, now.checked_load(of[: now.num_experts]))
                    for (_, now), of in zip(placed, load, strict=True)
                ]
                arrays["rank_load"] = np.stack(
                    [balance(of, now.table.copy(), 0, False)[3] for now, of in pairs]
                )
            arrays |= {"crossing": crossing} if self._crosses else {}
            arrays["late"] = np.array(
                [(now.holders & ~planned.holders).sum() for planned, now in placed]
            )
        self.stage.take(self._iteration, arrays, lambda: self._values(load, placed, arrays))

    def _values(
        self,
        load: np.ndarray,
        placed: Sequence[tuple[Placement, Placement]],
        arrays: Mapping[str, Any],
    ) -> dict[str, np.ndarray]:
        states = zip(self._states, load, placed, strict=True)
        layers = [
            LayerMetrics.from_load(s.name, of[: p[1].num_experts], planned=p[0], placement=p[1])
            for s, of, p in states
        ]
        homes = [state.parts.homes_only.home for state in self._states]
        own = [of[: len(home)] for of, home in zip(load, homes, strict=True)]
        routed = np.stack(
            [np.bincount(h, of, len(self._elsewhere)) for h, of in zip(homes, own, strict=True)]
        )
        computed = arrays.get("rank_load", np.array([[layer.computed_tokens] for layer in layers]))
        shapes = [state.shape(self._microbatches()) for state in self._states]
        replicas = np.array([layer.replicas for layer in layers])
        per_replica = [s.fetches * s.expert_bytes + s.returns * s.grad_bytes for s in shapes]
        names = ("load", "replica", "window", "copy", *(("home",) if "home" in arrays else ()))
        arrays_of_one = {name: arrays[name][None] for name in names}
        one = Figures(
            RunRecord(
                info=self.stage.info, iteration=np.zeros(1), time=np.zeros(1), **arrays_of_one
            )
        )
        copying, hidden, known = one.copying_ms[0], one.hidden_ms[0], ~np.isnan(arrays["copy"])
        token_ms = 1e3 * shapes[0].token_seconds(self._states[0].world)
        return {
            **step_metrics(own, routed, computed, token_ms=token_ms, price_ms=one.price_ms[0]),
            "replicas": replicas,
            "late_replicas": np.array([layer.late for layer in layers]),
            "bypassed_layers": np.array([layer.bypassed for layer in layers]),
            "copied_mib": replicas * per_replica / 2**20,
            **({"crossing_tokens": arrays["crossing"]} if "crossing" in arrays else {}),
            "hidden_share": np.divide(
                hidden, copying, out=np.full(len(known), np.nan), where=known & (copying > 0)
            ),
        }
