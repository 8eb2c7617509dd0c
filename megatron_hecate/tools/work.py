"""Work of MoE layers in each step, from rank loads or from placements of replicas.

Letters in shapes: T steps, L layers, R ranks, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hecate.plan import LayerShape, Placement, World
from megatron_hecate.record.prices import PricedRecord
from megatron_hecate.record.run_folder import RunInfo, RunRecord
from megatron_hecate.routing.tables import GroupShape
from megatron_hecate.tools.quotas import quotas_of_all
from megatron_hecate.tools.traffic import Traffic, token_traffic, traffic_of_loads


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """Work of layers in each step.

    Args:
        peak: (token, expert) pairs of the fullest rank in one microbatch, [T, L].
        trip: seconds of one all-to-all, [T, L].
        price: seconds per step of replicas beside their tokens, [T, L], or one number.
    """

    peak: np.ndarray
    trip: np.ndarray
    price: np.ndarray | float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Expert-parallel group and its layers.

    Args:
        world: ranks, nodes and speeds.
        shape: sizes of a layer.
        once: experts per token where the dispatcher sends a token to a node, or to a rank of its
            own node, once; 0: once per expert.
    """

    world: World
    shape: LayerShape
    once: int = 0

    def trip_seconds(self, traffic: Traffic, pairs: np.ndarray) -> np.ndarray:
        """Return the seconds of one all-to-all.

        Args:
            traffic: pairs of all microbatches on the links.
            pairs: pairs of all ranks and microbatches.
        """
        if self.once:
            traffic = traffic.sent_once(pairs, self.world, self.once)
        return traffic.seconds(self.shape.token_bytes / self.shape.microbatches, self.world)

    def work_of_ranks(
        self,
        loads: np.ndarray,
        *,
        fullest: np.ndarray | None = None,
        crossing: np.ndarray | None = None,
    ) -> Work:
        """Compute the work of rank loads, without replicas; sources send equally.

        Args:
            loads: pairs computed by each rank, all microbatches, [T, L, R].
            fullest: pairs of the fullest rank, [T, L]; ``None``: of ``loads``.
            crossing: see `traffic_of_loads`.
        """
        if fullest is None:
            fullest = loads.max(axis=2)
        traffic = traffic_of_loads(loads, self.world, crossing=crossing)
        trip = self.trip_seconds(traffic, loads.sum(axis=2))
        return Work(peak=fullest / self.shape.microbatches, trip=trip)

    def work_of_placements(
        self, loads: np.ndarray, placed: Sequence[Sequence[Placement]], transport: str
    ) -> tuple[Work, PricedRecord]:
        """Compute the work under FSSDP's quotas; sources send equally.

        Args:
            loads: pairs, all microbatches, [T, L, E] integers.
            placed: placements by step and layer.
            transport: transport of replicas.

        Returns:
            The work, and its replicas and their price as a record.
        """
        num_ranks = self.world.num_ranks
        steps, layers, num_experts = loads.shape
        peak = np.zeros((steps, layers))
        trip = np.zeros((steps, layers))
        # pairs of the first sources, [R + 1, T, L, E]
        until = np.multiply.outer(np.arange(num_ranks + 1), loads) // num_ranks
        source_tokens = np.diff(until, axis=0)
        for step, layer in np.ndindex(steps, layers):
            flow = _flow(source_tokens[:, step, layer], placed[step][layer], self.world)
            peak[step, layer] = flow.sum(axis=0).max() / self.shape.microbatches
            traffic = token_traffic(flow, self.world)
            trip[step, layer] = self.trip_seconds(traffic, flow.sum())
        # slots of replicas follow the homes
        homes_per_rank = num_experts // num_ranks
        replica = np.array(
            [
                [one.table[:, homes_per_rank:] for one in step_placements]
                for step_placements in placed
            ]
        )
        info = RunInfo(
            mode="fssdp",
            layers=tuple(map(str, range(layers))),
            num_experts=num_experts,
            ranks=num_ranks,
            node=self.world.node,
            slots=replica.shape[3],
            shape=dataclasses.asdict(self.shape),
            speeds=dataclasses.asdict(self.world.speeds),
            transport=transport,
        )
        times: dict[str, Any] = dict(iteration=np.arange(steps), time=np.zeros(steps))
        prices = PricedRecord(RunRecord(info=info, load=loads, replica=replica, **times))
        return Work(peak=peak, trip=trip, price=prices.price_ms / 1e3), prices


def _flow(loads: np.ndarray, placement: Placement, world: World) -> np.ndarray:
    """Count the tokens by source and computing rank, [R, R], under FSSDP's quotas.

    Args:
        loads: tokens by source and expert, [R, E].
        placement: homes and replicas.
        world: ranks and their nodes.
    """
    tokens, order = quotas_of_all(loads, placement, GroupShape(world, placement))
    flow = np.zeros((len(loads), world.num_ranks), dtype=np.int64)
    np.add.at(flow.T, order.rank, tokens.T)
    return flow
