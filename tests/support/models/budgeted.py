"""Training under HybridEP's budget of tokens per rank, by Megatron's own runner of steps that exceed it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import tiny_gpt
from megatron.core.transformer.moe.paged_stash import PagedStashRunner


def train(
    case: tiny_gpt.Case, *, steps: int, evaluations: int = 0, **hooks: Any
) -> tuple[tiny_gpt.Trained, list[int]]:
    """`tiny_gpt.train` as ``megatron.training`` does under ``moe_expert_rank_capacity_factor``.

    Args:
        evaluations: evaluations after each step, of which the last one's loss counts as the step's.

    Returns:
        What was trained, and the steps that were run again, without a budget or a graph.
    """
    run, ran_again = tiny_gpt.train(case, steps=0, **hooks), []
    schedule = tiny_gpt.get_forward_backward_func()
    runner = PagedStashRunner(run.chunks[0].config, False, run.chunks, run.optimizer, schedule)
    assert len(runner.moe_layers) == len(tiny_gpt.moe_layers(run.chunks))
    prepare = runner.prepare_for_rerun
    runner.prepare_for_rerun = lambda **stage: (ran_again.append(step), prepare(**stage))
    with mock.patch.object(tiny_gpt, "get_forward_backward_func", lambda: runner):
        for step in range(steps):
            run.step(step)
            for _ in range(evaluations):
                run.losses[-1] = run.evaluate(step)
    run.gather_params()
    return run, ran_again
