"""Routes that jump with every step and microbatch, replayed by Megatron's own router replay, and their counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import tiny_gpt
import torch

EXPERTS, TOKENS = 8, 32  # of a microbatch and rank, as `tiny_gpt.Case` has them
REPLAY = ("moe_enable_routing_replay", True)


def routes_of(step: int, microbatch: int, layer: int, rank: int) -> torch.Tensor:
    """[T, 2] experts of each token; two of three tokens choose the same one."""
    generator = torch.Generator().manual_seed(1_000 * step + 100 * microbatch + 10 * layer + rank)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores[::3] += 0.5
    scores[torch.arange(TOKENS) % 3 > 0, (5 * step + 3 * microbatch + layer) % EXPERTS] += 1
    return scores.topk(2).indices


def count(step: int, microbatches: range, layer: int, num_ranks: int) -> np.ndarray:
    """[E] tokens, one by one."""
    load = np.zeros(EXPERTS, dtype=np.int64)
    for microbatch in microbatches:
        for rank in range(num_ranks):
            for token in routes_of(step, microbatch, layer, rank).tolist():
                for expert in token:
                    load[expert] += 1
    return load


def replay(accumulate: int, *, then_backward: bool = True) -> None:
    """Have every forward of `tiny_gpt` replay routes as training loops for RL do: set right before the forward of each
    microbatch, and replayed once more where the backward computes it again."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    original, seen = tiny_gpt.forward_step, {}

    def forward_step(iterator: Any, model: Any, *args: Any, **settings: Any) -> Any:
        number = seen[model] = seen.get(model, -1) + 1
        for layer in tiny_gpt.moe_layers([model]):
            routes = routes_of(
                number // accumulate,
                number % accumulate,
                layer.layer_number - 1,
                tiny_gpt.parallel_state.get_data_parallel_rank(),
            )
            layer.router.router_replay.set_target_indices(routes)
            layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        result = original(iterator, model, *args, **settings)
        for layer in tiny_gpt.moe_layers([model]) if then_backward else []:
            layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return result

    tiny_gpt.forward_step = forward_step


def note_forecasts(found: list[np.ndarray]) -> None:
    from megatron_hecate.step.layer_planner import EarlyPlans

    plan = EarlyPlans.plan

    def noted(early: EarlyPlans, index: int, inputs: Any) -> Any:
        found.append(np.array(inputs.forecast))
        return plan(early, index, inputs)

    EarlyPlans.plan = noted


def train_steps(case: Any, steps: int, **settings: Any) -> Any:
    """Train step by step; the first step as all others."""
    run = tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook(**settings) if settings else None)
    for step in range(steps):
        run.step(step)
    run.gather_params()
    return run


def assert_counted(
    found: list[np.ndarray], known: torch.Tensor, *, padded: torch.Tensor | None = None
) -> None:
    """Compare forecasts of two steps and layers with ``known`` tokens, and ``padded`` ones at expert 0."""
    true = []
    for step in range(2):
        for layer in range(2):
            load = np.zeros(EXPERTS, dtype=np.int64)
            if padded is not None:
                load[0] = 2 * int(padded.sum())
            for rank in range(2):
                for expert in routes_of(step, 0, layer, rank)[known].flatten().tolist():
                    load[expert] += 1
            true.append(load)
    assert_forecasts(found, true)


def assert_forecasts(found: list[np.ndarray], true: list[np.ndarray]) -> None:
    assert len(found) == len(true)
    assert all(map(np.array_equal, found, true)), (found, true)
