"""Compile all of planning when FSSDP is switched on, not in the first iteration."""

from __future__ import annotations

import functools

import numpy as np

from megatron_hecate.plan.calibrate import calibrate
from megatron_hecate.plan.drift import ERRORS, drifted
from megatron_hecate.plan.materialize import plan_guests
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.route import largest_load, split_quotas
from megatron_hecate.plan.world import World


@functools.cache
def compile_planning() -> None:
    """Plan one layer that needs every part. A minute the first time on a machine, a second from the cache."""
    world = World(node=(0, 0, 1, 1))
    homes = Placement.initial(8, 4, num_slots=1)
    load = np.array([[90, 1, 30, 1, 5, 0, 2, 0]] * 4, dtype=np.int32)  # as layers gather it
    forecast = load.sum(axis=0)
    placement = plan_guests(forecast, homes, world)  # one slot is too little: all starts are tried
    scenarios = drifted(np.sqrt(forecast / forecast.sum()), np.full((8, ERRORS), 0.1, np.float32), 0.01).T
    plan_guests(forecast, homes, world, scenarios=lambda: scenarios, previous=placement)
    split_quotas(load, placement, world, only=1)
    split_quotas(load, placement, world)
    largest_load(forecast, placement, world)
    calibrate(forecast, homes, world, copy_tokens=0.0, most_late=2)
