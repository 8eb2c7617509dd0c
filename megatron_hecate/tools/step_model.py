"""Time of a training step in closed form, from the work of its MoE layers.

An all-to-all ends for no rank before the last rank has begun it, so the fullest rank sets the pace
of every layer. A layer takes, in one microbatch, forward and backward together,

    passes * (dense + pair * peak) + trips * trip + price / microbatches

and a step (1F1B) takes all microbatches of its slowest stage and one pass through the others, which
interleaved chunks shorten. That is exact for one stage and for stages of equal length, and else an
upper bound: where an early stage is the slowest, some of its forwards run during that pass.
Letters in shapes: T steps, L layers.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from megatron_hecate.plan.cost import BACKWARD
from megatron_hecate.tools.work import Work

# parts of a difference between two steps, in the order in which they are exchanged
EXPERT_COMPUTE = "expert compute"
ALL_TO_ALL = "all-to-all"
PARTS = (EXPERT_COMPUTE, ALL_TO_ALL, "copies and routing")
# halvings of the interval in which the time outside experts is searched
BISECTIONS: int = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepModel:
    """Times that do not depend on routing, and the schedule of the pipeline.

    Args:
        dense: forward seconds of a layer outside its experts: attention, router, shared experts.
        pair: forward seconds of one (token, expert) pair in one expert.
        stages: for each pipeline stage, the columns of a `Work` that stand for its layers.
        microbatches: microbatches per step.
        chunks: chunks per stage; two or more are interleaved.
        head: forward seconds after the last layer, on the last stage.
        hidden: share of every all-to-all that hides behind other compute.
        recompute: whether the backward of a layer repeats its forward.
    """

    dense: float
    pair: float
    stages: tuple[tuple[int, ...], ...]
    microbatches: int
    chunks: int = 1
    head: float = 0.0
    hidden: float = 0.0
    recompute: bool = False

    def layer_seconds(self, work: Work) -> np.ndarray:
        """Return the seconds of each layer in one microbatch, [T, L]."""
        passes = 1 + BACKWARD + self.recompute
        # dispatch and combine; forward, backward and repeated forward
        trips = 2 * (2 + self.recompute) * (1 - self.hidden)
        compute = passes * (self.dense + self.pair * work.peak)
        return compute + trips * work.trip + work.price / self.microbatches

    def step_seconds(self, work: Work) -> np.ndarray:
        """Return the seconds of each step, [T]."""
        layers = self.layer_seconds(work)
        stages = np.stack([layers[:, list(columns)].sum(axis=1) for columns in self.stages])
        stages[-1] += (1 + BACKWARD) * self.head
        slowest = stages.max(axis=0)
        return self.microbatches * slowest + (stages.sum(axis=0) - slowest) / self.chunks

    def fitted(self, work: Work, seconds: float) -> StepModel:
        """Scale the time outside experts and all-to-alls so that a mean step takes ``seconds``.

        Raises:
            ValueError: if experts, all-to-alls and replicas alone take longer; the message is their
                time in milliseconds.
        """

        def scaled(share: float) -> StepModel:
            # 1 ns: a model without compute outside experts, too, can be scaled
            dense = share * max(self.dense, 1e-9)
            return dataclasses.replace(self, dense=dense, head=share * self.head)

        def mean_seconds(share: float) -> float:
            return float(scaled(share).step_seconds(work).mean())

        if seconds <= mean_seconds(0.0):
            raise ValueError(f"{mean_seconds(0.0) * 1e3:.1f}")
        low, high = 0.0, 1.0
        while mean_seconds(high) < seconds:
            low, high = high, 2 * high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if mean_seconds(middle) < seconds:
                low = middle
            else:
                high = middle
        return scaled(high)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Prediction:
    """Modelled steps under forced balance, of stock, and with replicas; milliseconds.

    Args:
        model: times independent of routing.
        forced: work under forced balance.
        stock: work of stock expert parallelism.
        run: work with replicas; `stock` without any.
    """

    model: StepModel
    forced: Work
    stock: Work
    run: Work

    def _step_ms(self, work: Work) -> np.ndarray:
        return 1e3 * self.model.step_seconds(work)

    @cached_property
    def forced_ms(self) -> np.ndarray:
        """Time of a step under forced balance, [T]."""
        return self._step_ms(self.forced)

    @cached_property
    def stock_ms(self) -> np.ndarray:
        """Time of a step of stock expert parallelism, [T]."""
        return self._step_ms(self.stock)

    @cached_property
    def run_ms(self) -> np.ndarray:
        """Time of a step with replicas, [T]."""
        return self._step_ms(self.run)

    @property
    def lost_ms(self) -> np.ndarray:
        """Time lost to imbalance as routed, [T]."""
        return self.stock_ms - self.forced_ms

    @property
    def left_ms(self) -> np.ndarray:
        """Time lost to imbalance and replicas, [T]; below 0 where messages were saved."""
        return self.run_ms - self.forced_ms

    def parts_ms(self) -> dict[str, tuple[float, float]]:
        """Split the time lost to imbalance, and won back, by exchanging one part after the other.

        Returns:
            By name in `PARTS`, means over steps: ms lost as routed, ms won back by replicas.
        """
        columns = []
        for work in (self.forced, self.run):
            peak = dataclasses.replace(self.stock, peak=work.peak)
            trip = dataclasses.replace(peak, trip=work.trip)
            means = [float(self._step_ms(one).mean()) for one in (self.stock, peak, trip, work)]
            columns.append([means[i] - means[i + 1] for i in range(len(PARTS))])
        return dict(zip(PARTS, zip(*columns, strict=True), strict=True))

    def _beyond_ms(self, work: Work) -> np.ndarray:
        """Return the time per step of each layer of ``work`` beyond forced balance, [T, L]."""
        seconds = self.model.layer_seconds(work) - self.model.layer_seconds(self.forced)
        return 1e3 * self.model.microbatches * seconds

    @cached_property
    def lost_of_layers(self) -> np.ndarray:
        """Time that each layer loses as routed, [T, L]."""
        return self._beyond_ms(self.stock)

    @cached_property
    def won_of_layers(self) -> np.ndarray:
        """Time that replicas win back in each layer, net of their cost, [T, L]."""
        return self.lost_of_layers - self._beyond_ms(self.run)
