"""Simulate whole steps with rivals, for ``what-if ... --rivals NAME,...``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_hecate.tools.outcome import Outcome, Way
from megatron_hecate.tools.simulated_job import SimulatedJob
from megatron_hecate.tools.step_model import Work
from megatron_hecate.tools.traffic import LayerPlan, add
from rivals import find_planners
from rivals.planner import INTERVAL, Planner, Setting
from rivals.score import STATE_PER_GRAD


def planned(planner: type[Planner], counts: np.ndarray, setting: Setting, *, once: int = 0) -> Work:
    """Plan all steps and layers with ``planner``.

    Args:
        planner: class of the planner.
        counts: pairs per step, layer, rank and expert, [T, L, R, E].
        setting: setting of every layer.
        once: see `Work.of`.

    Returns:
        Work of all layers.
    """
    world = setting.world
    shape = setting.shape
    state_bytes = STATE_PER_GRAD * shape.grad_bytes
    plans: list[list[LayerPlan]] = []
    planners = [planner(setting) for _ in range(counts.shape[1])]
    for step in range(len(counts)):
        plans.append([])
        for layer, plan in enumerate(planners):
            # A planner's history has earlier steps only.
            placed = plan.place(list(counts[:step, layer]))
            load = plan.gate(counts[step, layer])
            final = plan.correct(load, placed)
            moves = plan.moves(placed, final)
            early = add((moves.early, shape.expert_bytes), (moves.state, state_bytes))
            late = add((moves.late, shape.expert_bytes))
            back = add((moves.grads, shape.grad_bytes))
            flow = plan.split(load, final).flow(world.num_ranks)
            extra = final.holders.sum(axis=0) - setting.homes_per_rank
            plans[-1].append(LayerPlan(flow, early, late, back, int(extra.max())))
    return Work.of(plans, world, shape, once=once)


def outcomes(names: Sequence[str], job: SimulatedJob, slots: int) -> list[Outcome]:
    """Simulate the planners ``names`` for ``what-if``.

    A planner plans from the loads of one microbatch; all microbatches have equal loads. It replays
    `INTERVAL` steps before the first counted step; a short trace is extended by its first step.
    With fewer than `INTERVAL` counted steps, periodic planners plan one step before the first
    counted step, so that the mean excludes the move.

    Args:
        names: names of planners.
        job: simulated job.
        slots: slots per rank, equal to FSSDP's.

    Raises:
        ValueError: for an unknown name.
    """
    found = find_planners()
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"--rivals {','.join(unknown)}: there are {', '.join(found)}")
    counted = len(job.counts) - job.first
    # Steps before the first counted step, so that periodic planners have planned once.
    begin = job.first - INTERVAL - (counted < INTERVAL)
    counts = job.counts[np.maximum(np.arange(begin, len(job.counts)), 0)]
    # Planners plan from the loads of one microbatch.
    counts = np.rint(counts / job.schedule.microbatches).astype(np.int64)
    shape = job.model.shape(hidden_seconds=job.timing.dense)
    results = []
    setting = Setting(job.model.experts, world=job.world, shape=shape, slots=slots)
    for name in names:
        planner = found[name]
        way = Way(slots=slots, lifetime=planner.lifetime)
        steps = planned(planner, counts, setting, once=job.once)
        work = Work(*(getattr(steps, field.name)[-counted:] for field in dataclasses.fields(Work)))
        work = job.of_microbatches(work)
        outcome = job.run(f"{name}, {slots} slot{'s' * (slots > 1)}", work, way, corrects=True)
        results.append(dataclasses.replace(outcome, memory=job.memory(**planner.memory(setting))))
    return results
