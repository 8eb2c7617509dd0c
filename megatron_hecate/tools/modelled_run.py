"""Time that imbalance costs a recorded run, by the step model of `what_if`.

Letters in shapes: T iterations, L layers.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from megatron_hecate.plan import LayerShape, World
from megatron_hecate.plan.cost import BACKWARD
from megatron_hecate.record.analysis import Figures
from megatron_hecate.tools.layer_work import Work, work_of_ranks
from megatron_hecate.tools.outcome import PARTS
from megatron_hecate.tools.recorded_run import RecordedRun
from megatron_hecate.tools.simulated_job import SimulatedJob
from megatron_hecate.tools.step_model import PipelineSchedule, Timing, fit_outside, simulate


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ModelledRun:
    """Modelled times of all iterations of a record; milliseconds.

    Args:
        figures: counted and measured figures of the run.
        job: job of the record, as `what_if` simulates it.
        shape: sizes of a layer.
        timing: times independent of routing, scaled to the measured time of a step.
    """

    figures: Figures
    job: SimulatedJob
    shape: LayerShape
    timing: Timing

    @classmethod
    def of(cls, run: RecordedRun, job: SimulatedJob) -> ModelledRun:
        """Model a run.

        Args:
            run: record of the run, with sizes and speeds.
            job: job that `what_if` builds from the record alone.

        Raises:
            ValueError: if the modelled experts and all-to-alls take longer than the measured step.
        """
        figures = run.figures
        found = cls(figures=figures, job=job, shape=figures.costs.shape, timing=job.timing)
        if figures.observed or not figures.step_ms > 0:
            return found
        # With FSSDP the measured step is that of the loads as computed.
        copies = float(figures.of_step(figures.price_ms).mean()) / 1e3

        def step_seconds(timing: Timing) -> float:
            return float(simulate(found.after, timing, found.schedule).total.mean()) + copies

        try:
            timing = fit_outside(job.timing, figures.step_ms / 1e3, step_seconds)
        except ValueError as error:
            raise ValueError(
                f"by the record's speeds, experts and all-to-alls alone take {error} ms of a step, "
                f"but a step took {figures.step_ms:.1f} ms: train with --moe-fssdp-speeds FILE, "
                "which megatron-hecate measure has written on that machine"
            ) from error
        return dataclasses.replace(found, timing=timing)

    @property
    def schedule(self) -> PipelineSchedule:
        """Schedule of the pipeline."""
        return self.job.schedule

    @property
    def _world(self) -> World:
        return self.figures.costs.world

    @cached_property
    def before(self) -> Work:
        """Work as routed, [T, L]."""
        work = work_of_ranks(self.figures.before, self._world, self.shape, once=self.job.once)
        return dataclasses.replace(work, peak=self.figures.fullest / self.shape.microbatches)

    @cached_property
    def after(self) -> Work:
        """Work as computed, without copies, [T, L]."""
        figures = self.figures
        if figures.observed:
            return self.before
        crossing = figures.record.crossing
        work = work_of_ranks(
            figures.after, self._world, self.shape, crossing=crossing, once=self.job.once
        )
        return dataclasses.replace(work, peak=figures.fullest_computed / self.shape.microbatches)

    @cached_property
    def forced(self) -> Work:
        """Work under forced balance, [T, L]."""
        mean = self.figures.before.mean(axis=2, keepdims=True)
        even = np.broadcast_to(mean, self.figures.before.shape)
        return work_of_ranks(even, self._world, self.shape, once=self.job.once)

    def _step_ms(self, work: Work) -> np.ndarray:
        """Simulate the steps of ``work``, [T] ms."""
        return 1e3 * simulate(work, self.timing, self.schedule).total

    @cached_property
    def stock_ms(self) -> np.ndarray:
        """Time of a step of stock expert parallelism, [T]."""
        return self._step_ms(self.before)

    @cached_property
    def forced_ms(self) -> np.ndarray:
        """Time of a step under forced balance, [T]."""
        return self._step_ms(self.forced)

    @cached_property
    def price_ms(self) -> np.ndarray:
        """Cost of replicas, [T]."""
        return self.figures.of_step(self.figures.price_ms)

    @cached_property
    def run_ms(self) -> np.ndarray:
        """Time of a step as it ran, [T]."""
        return self._step_ms(self.after) + self.price_ms

    @property
    def lost_ms(self) -> np.ndarray:
        """Time lost to imbalance as routed, [T]."""
        return self.stock_ms - self.forced_ms

    @property
    def left_ms(self) -> np.ndarray:
        """Time lost to imbalance and replicas as it ran, [T]; below 0 where messages were saved."""
        return self.run_ms - self.forced_ms

    def parts_ms(self) -> dict[str, tuple[float, float]]:
        """Split the time lost as routed and the time won back, means over iterations.

        Returns:
            By name of the part: ms lost as routed, ms won back.
        """
        before = self.before
        peak = dataclasses.replace(before, peak=self.forced.peak)
        lost = [self.stock_ms, self._step_ms(peak), self.forced_ms]
        levelled = dataclasses.replace(before, peak=self.after.peak)
        trip = np.maximum(self.after.trip, np.minimum(self.forced.trip, before.trip))
        shorter = dataclasses.replace(levelled, trip=trip)
        won = [self.stock_ms, self._step_ms(levelled), self._step_ms(shorter)]
        won += [self._step_ms(self.after), self.run_ms]
        parts = {}
        for at, name in enumerate(PARTS):
            of_lost = 0.0
            if at < 2:
                of_lost = float((lost[at] - lost[at + 1]).mean())
            parts[name] = (of_lost, float((won[at] - won[at + 1]).mean()))
        return parts

    def layers_ms(self, work: Work) -> tuple[np.ndarray, np.ndarray]:
        """Return the time that each layer of ``work`` loses, [T, L]: compute and all-to-all."""
        passes = 1 + BACKWARD + self.timing.recompute
        # Dispatch and combine, forward and backward, and in the repeated forward.
        trips = 2 * (2 + self.timing.recompute) * (1 - self.timing.hidden)
        times = 1e3 * self.shape.microbatches
        compute = times * passes * self.timing.pair * (work.peak - self.forced.peak)
        return compute, times * trips * (work.trip - self.forced.trip)

    @cached_property
    def lost_of_layers(self) -> np.ndarray:
        """Time that each layer loses as routed, [T, L]."""
        return sum(self.layers_ms(self.before))

    @cached_property
    def won_of_layers(self) -> np.ndarray:
        """Time that FSSDP won back in each layer, net of the cost of replicas, [T, L]."""
        return self.lost_of_layers - sum(self.layers_ms(self.after)) - self.figures.price_ms
