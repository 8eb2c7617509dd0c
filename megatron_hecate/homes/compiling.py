"""Compilation of the search for homes before the first iteration."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_hecate.homes.planner import HomeSearch
from megatron_hecate.plan import CopyCost, Placement, World
from megatron_hecate.plan.compiled import in_turn


def compile_home_planner(notice: Callable[[], None] = lambda: None) -> None:
    """Compile the functions of the search by planning one small layer.

    Args:
        notice: called first if code is not cached, so that compiling takes seconds.
    """
    search = HomeSearch(
        homes=Placement.initial(8, 4, num_slots=1),
        world=World(node=(0, 0, 1, 1)),
        cost=CopyCost(crossing=1.0),
        expert_bytes=1.0,
        token_seconds=1.0,
        horizon=1000,
    )
    load = np.array([90, 1, 30, 1, 5, 0, 2, 0])
    with in_turn(notice):
        search.find(load[None], np.arange(8)[None])
