"""Plans that a thread makes while the optimizer steps.

Oracle: the same training with all plans made in the main thread, bitwise; and the names of threads that plan.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import tiny_gpt
from ranks import ranks


def _train(case: Any, microbatches: Sequence[int]) -> tuple[Any, list[str]]:
    """A run whose hot experts move, with so many microbatches in each step, and the name of the thread of each plan."""
    from megatron_hecate.step import layer_planner

    threads: list[str] = []
    real = layer_planner.plan_replicas

    def named(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*args, **kwargs)

    with mock.patch.object(layer_planner, "plan_replicas", named):
        hook = tiny_gpt.fssdp_hook()
        run = tiny_gpt.train(case, steps=0, hook=hook, before_step=tiny_gpt.move_skew_sometimes)
        for step, count in enumerate(microbatches):
            run.step(step, count)
    run.read_params()
    return run, threads


@ranks(2)
def test_plans_of_the_thread_are_those_of_the_layers() -> None:
    """Also where the thread guesses wrong, since the number of microbatches changes, and where it fails."""
    from megatron_hecate.step.layer_planner import EarlyPlans, PlanInputs

    case = tiny_gpt.initialized(accumulate=2, skew=4.0)
    for microbatches in ((2, 2, 2, 2, 2, 2), (2, 2, 1, 3, 2)):
        with mock.patch.object(EarlyPlans, "start", lambda *_: None):
            late, threads = _train(case, microbatches)
        assert set(threads) == {"MainThread"}
        early, threads = _train(case, microbatches)
        assert tiny_gpt.difference(late, early) == tiny_gpt.SAME and early.replicas > 0
        layers = tiny_gpt.moe_layers(early.chunks)
        # the first iteration has no forecast, and the first of the host may come before the thread
        assert threads.count("fssdp plans") >= 2 * len(layers), threads
        # the plans after the last step are made, and not asked for
        is_wrong = len(set(microbatches)) > 1
        assert is_wrong or len(threads) <= len(microbatches) * len(layers), threads

    real = PlanInputs.plan

    def fails_early(inputs: PlanInputs) -> Any:
        if threading.current_thread().name == "fssdp plans":
            raise MemoryError("planted")
        return real(inputs)

    with mock.patch.object(PlanInputs, "plan", fails_early):
        failed, _ = _train(case, microbatches)
    assert tiny_gpt.difference(late, failed) == tiny_gpt.SAME
