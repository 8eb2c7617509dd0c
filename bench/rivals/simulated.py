"""Rivals in the simulation of a whole step, for ``python -m megatron_hecate --what-if ... --rivals NAME,...``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_hecate.offline.simulated_job import Outcome, SimulatedJob
from megatron_hecate.offline.step_model import Work
from megatron_hecate.offline.traffic import LayerPlan, add
from rivals import find_planners
from rivals.planner import INTERVAL, Planner, Setting
from rivals.score import STATE_PER_GRAD


def planned(planner: type[Planner], counts: np.ndarray, setting: Setting, *, once: int = 0) -> Work:
    """What layers do under ``planner``. ``counts``: [T, L, R, E] pairs of a step; ``once``: as in `Work.of`."""
    world, shape, plans = setting.world, setting.shape, []
    each = [planner(setting) for _ in range(counts.shape[1])]
    for step in range(len(counts)):
        plans.append([])
        for layer, plan in enumerate(each):
            placed = plan.place(list(counts[:step, layer]))
            load = plan.gate(counts[step, layer])
            final = plan.correct(load, placed)
            moves = plan.moves(placed, final)
            early = add(
                (moves.early, shape.expert_bytes), (moves.state, STATE_PER_GRAD * shape.grad_bytes)
            )
            late, back = add((moves.late, shape.expert_bytes)), add((moves.grads, shape.grad_bytes))
            plans[-1].append(
                LayerPlan(plan.split(load, final).flow(world.num_ranks), early, late, back)
            )
    return Work.of(plans, world, shape, once=once)


def outcomes(names: Sequence[str], job: SimulatedJob, slots: int) -> list[Outcome]:
    """What ``--what-if`` says of these planners, with as many ``slots`` as FSSDP has.

    A planner sees the loads of one microbatch, which are all alike. Before the steps that count it sees as many as lie
    between two plans of those that plan now and then; the first step of a short trace stands in for what was before.
    With fewer counted steps than that, their plan comes one step before these: its move is not in the mean.

    Raises:
        ValueError: for an unknown name.
    """
    found = find_planners()
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"--rivals {','.join(unknown)}: there are {', '.join(found)}")
    counted = len(job.counts) - job.first
    begin = job.first - INTERVAL - (counted < INTERVAL)
    counts = job.counts[np.maximum(np.arange(begin, len(job.counts)), 0)]
    counts = np.rint(counts / job.schedule.microbatches).astype(np.int64)
    shape, results = job.model.shape(hidden_seconds=job.timing.dense), []
    setting = Setting(job.model.experts, world=job.world, shape=shape, slots=slots)
    for name in names:
        planner, way = found[name], dict(slots=slots, lifetime=found[name].lifetime)
        steps = planned(planner, counts, setting, once=job.once)
        work = Work(*(getattr(steps, field.name)[-counted:] for field in dataclasses.fields(Work)))
        outcome = job.run(f"{name}, {slots} slot{'s' * (slots > 1)}", work, corrects=True, **way)
        results.append(dataclasses.replace(outcome, memory=job.memory(**planner.memory(setting))))
    return results
