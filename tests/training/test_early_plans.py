"""Plans that a thread makes while the optimizer steps.

Oracle: the same training with all plans made in the main thread, bitwise; and the names of threads that plan.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ranks import ranks


def _train(case: Any, steps: int, **settings: Any) -> tuple[Any, list[str]]:
    """A run whose hot experts move, and the name of the thread that made each plan."""
    import tiny_gpt

    from megatron_hecate.step import early_plans

    threads: list[str] = []
    real = early_plans.plan_replicas

    def named(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early_plans, "plan_replicas", named)
        hook = tiny_gpt.fssdp_hook(**settings)
        run = tiny_gpt.train(case, steps=steps, hook=hook, before_step=tiny_gpt.move_skew_sometimes)
    return run, threads


@ranks(2)
def test_plans_of_the_thread_are_those_of_the_layers() -> None:
    import tiny_gpt

    from megatron_hecate.step.early_plans import EarlyPlans

    case = tiny_gpt.initialized(accumulate=2, skew=4.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyPlans, "start", lambda *_: None)
        late, threads = _train(case, 6)
        assert set(threads) == {"MainThread"}
    early, threads = _train(case, 6)
    assert tiny_gpt.difference(late, early) == tiny_gpt.SAME
    assert early.replicas > 0
    layers = len(tiny_gpt.moe_layers(early.chunks))
    by_thread = threads.count("fssdp plans")
    # five iterations follow another one, and the first of the host may come before the thread
    assert by_thread >= 2 * layers, threads
    # the plans after the last step are made, and not asked for
    assert threads.count("MainThread") + by_thread <= 6 * layers, threads


@ranks(2)
def test_plans_for_a_wrong_guess_are_made_anew() -> None:
    """More microbatches than in the iteration before, other homes' loads, and a plan that failed in the thread."""
    import tiny_gpt

    from megatron_hecate.step.early_plans import EarlyPlans, PlanInputs

    case = tiny_gpt.initialized(accumulate=2, skew=4.0)

    def train() -> Any:
        run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
        for step, microbatches in enumerate((1, 3, 2), start=2):
            run.chunks[0].zero_grad_buffer()
            run.optimizer.zero_grad()
            run.losses.append(tiny_gpt.run(case, run.chunks, step, num_microbatches=microbatches))
            run.optimizer.step()
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyPlans, "start", lambda *_: None)
        late = train()
    early = train()
    assert tiny_gpt.difference(late, early) == tiny_gpt.SAME

    real = PlanInputs.plan

    def fails_early(inputs: PlanInputs) -> Any:
        if threading.current_thread().name == "fssdp plans":
            raise MemoryError("planted")
        return real(inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanInputs, "plan", fails_early)
        failed = train()
    assert tiny_gpt.difference(late, failed) == tiny_gpt.SAME
