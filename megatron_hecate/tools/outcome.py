"""Result of one simulated way to train, and what it gains over stock, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from megatron_hecate.replicas.memory_estimate import ExpertMemory
from megatron_hecate.tools.layer_work import Work
from megatron_hecate.tools.step_model import PipelineSchedule, Timing, simulate

# parts of a difference between two steps, in the order in which they are exchanged
EXPERT_COMPUTE = "expert compute"
PARTS = (EXPERT_COMPUTE, "all-to-all", "messages saved", "copies and routing")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """Settings of FSSDP to simulate.

    Args:
        slots: replica slots per rank and layer.
        lifetime: lifetime of replicas.
        late: most replicas that a layer may fetch after the gate.
        rehome: steps between searches for better homes; 0: homes do not move.
        transport: transport of replicas, ``nvlink`` or ``p2p``.
    """

    slots: int = 0
    lifetime: str = "iteration"
    late: int = 0
    rehome: int = 0
    transport: str = "nvlink"

    @property
    def name(self) -> str:
        """Label of the way in the table."""
        name = f"FSSDP, {self.slots} slot{'s' * (self.slots > 1)}, {self.lifetime}"
        if self.late:
            name += f", {self.late} late"
        if self.rehome:
            name += f", homes every {self.rehome}"
        return f"{name}, {self.transport}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one way to train; means over steps.

    Args:
        name: label in the table.
        slots: replica slots per rank and layer.
        lifetime: lifetime of replicas.
        late: most replicas that a layer may fetch after the gate.
        seconds: time of a step.
        imbalance: load of the fullest rank over the mean, averaged over steps and layers.
        exposed: seconds of a step spent waiting for copies.
        sent: bytes of copies that a rank sends in a step.
        memory: memory of a rank's experts.
        rehome: steps between searches for better homes; 0: homes do not move.
        transport: transport of replicas; empty for stock and forced balance.
        parts: seconds per step that the way gains over stock, by name of `PARTS`; below 0 if it
            loses. Their sum is stock's time less ``seconds``.
        used: most replicas that a rank holds in any layer and step.
    """

    name: str
    slots: int
    lifetime: str
    late: int
    seconds: float
    imbalance: float
    exposed: float
    sent: float
    memory: ExpertMemory
    rehome: int = 0
    transport: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    used: int = 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Baselines:
    """Work of the two ways to which all others are compared, for all layers of the model.

    Args:
        forced: work under forced balance.
        stock: work of stock expert parallelism.
    """

    forced: Work
    stock: Work


def parts_of_gain(
    work: Work, baselines: Baselines, timing: Timing, schedule: PipelineSchedule, *, moving: float
) -> dict[str, float]:
    """Split the seconds per step that ``work`` gains over stock.

    The parts are found by exchanging stock's work for ``work`` in turn: loads of the fullest rank;
    all-to-alls, at best as short as under forced balance; the rest of the all-to-alls, which
    replicas shorten because tokens stay on their node; and all costs of replicas.

    Args:
        work: work of all layers of the model.
        baselines: work of stock and of forced balance.
        timing: times independent of routing.
        schedule: pipeline schedule of ``work``.
        moving: seconds per step of moving homes.
    """
    stock = baselines.stock
    shape = np.broadcast_shapes(stock.peak.shape, work.peak.shape)
    balanced = np.broadcast_to(baselines.forced.trip, shape)
    trip = np.broadcast_to(work.trip, shape)
    # Without imbalance to remove, forced balance is no shorter than stock.
    levelled = np.where(trip < balanced, np.minimum(balanced, stock.trip), trip)
    exchanged = dataclasses.replace(stock, peak=np.broadcast_to(work.peak, shape))
    steps = [stock, exchanged, dataclasses.replace(exchanged, trip=levelled)]
    steps += [dataclasses.replace(exchanged, trip=trip), work]
    seconds = [float(simulate(one, timing, schedule).total.mean()) for one in steps]
    seconds[-1] += moving
    pairs = zip(PARTS, seconds, seconds[1:], strict=False)
    return {name: before - after for name, before, after in pairs}


def spread(loads: np.ndarray, num_ranks: int, pairs: float) -> np.ndarray:
    """Scale recorded loads to the pairs of the job's ranks.

    Recorded sources are summed where they are a multiple of the ranks; otherwise each is dealt
    evenly to ranks, or all sources are summed and dealt where the numbers do not divide.

    Args:
        loads: recorded pairs by step, layer, source and expert, [T, L, N, E].
        num_ranks: number of ranks R.
        pairs: pairs per rank, step and layer.

    Returns:
        Whole pairs [T, L, R, E].
    """
    steps, layers, sources, experts = loads.shape
    if sources % num_ranks == 0:
        loads = loads.reshape(steps, layers, num_ranks, -1, experts).sum(axis=3)
    elif num_ranks % sources:
        loads = loads.sum(axis=2, keepdims=True)
    loads = np.repeat(loads, num_ranks // loads.shape[2], axis=2)
    scale = pairs * num_ranks / loads.sum(axis=(2, 3), keepdims=True)
    return np.rint(loads * scale).astype(np.int64)
