"""Planners that stand in for ours in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hecate.plan import CopyCost, plan_replicas


def no_replicas(forecast: Any, homes: Any, world: Any, **settings: Any) -> Any:
    """Stands in for `plan_replicas`."""
    return homes


def coldest_experts(forecast: Any, homes: Any, world: Any, **settings: Any) -> Any:
    """Stands in for `plan_replicas`: the coldest experts in every slot."""
    return plan_replicas(forecast.max() - forecast, homes, world, cost=CopyCost())


def replace_planner(planner: Callable) -> None:
    """Have ``planner`` plan before the gate, in this process."""
    from megatron_hecate.step.layer_planner import EarlyPlans, PlanInputs

    def plan(_: EarlyPlans, index: int, inputs: PlanInputs) -> Any:
        settings = dict(cost=inputs.cost, previous=inputs.previous)
        return planner(inputs.forecast, inputs.homes, inputs.world, **settings)

    EarlyPlans.plan = plan
