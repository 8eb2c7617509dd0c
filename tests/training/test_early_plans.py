"""Plans that a thread makes while the optimizer steps.

Oracle: the same training with all plans made in the main thread, bitwise; and the names of threads that plan.
"""

from __future__ import annotations

import threading
import time
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

    case = tiny_gpt.Case(accumulate=2, skew=4.0)
    tiny_gpt.initialize(case)
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

    case = tiny_gpt.Case(accumulate=2, skew=4.0)
    tiny_gpt.initialize(case)

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


@ranks(2)
def test_sizes_of_the_thread_are_of_the_kind_that_it_asked_for() -> None:
    """A forward outside of Megatron's schedules begins while the thread works out sizes; costs stay the same on all
    ranks."""
    import tiny_gpt
    import torch.distributed as dist
    from loops import Loop

    from megatron_hecate.step.layer_state import LayerState

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    real, is_held = LayerState._shape, [dist.get_rank() == 1]

    def held(state: Any, *key: Any) -> Any:
        if is_held[0] and threading.current_thread().name == "fssdp plans":
            is_held[0] = False
            end = time.monotonic() + 10
            while state.in_schedule and time.monotonic() < end:
                time.sleep(1e-3)
        return real(state, *key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerState, "_shape", held)
        loop = Loop(case, tiny_gpt.fssdp_hook(timeout=20))
        for step in range(4):
            loop.zero()
            if step == 1:
                loop.forward(step, 0).backward()
                loop.finish()
            else:
                loop.call(step, 2)
            loop.update()
    for layer in tiny_gpt.moe_layers(loop.chunks):
        sizes: list[Any] = [None, None]
        dist.all_gather_object(sizes, layer.fssdp._shapes)
        assert sizes[0] and all(
            sizes[1].get(key, size) == size for key, size in sizes[0].items()
        ), sizes
