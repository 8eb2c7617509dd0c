"""Slow ranks and hot ranks of a training on CPU ranks. Oracle: the CPU time that the test adds to each token of each
rank, and the skew of its routers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from ranks import ranks

from megatron_hecate import HecateConfig, fssdp

STEPS, SLOW, PACE = 20, 2, 1.6
MICROSECONDS = 30.0  # added to each token of each rank, far above the time of a tiny expert


def _delay(experts: Iterable[Any], pace: float) -> None:
    """Add CPU time to the forwards of single experts: ``pace`` times `MICROSECONDS` per token."""

    def burn(module: Any, inputs: tuple[Any, ...]) -> None:
        end = time.thread_time() + 1e-6 * MICROSECONDS * pace * inputs[0].shape[0]
        while time.thread_time() < end:
            pass

    for expert in experts:
        expert.register_forward_pre_hook(burn)


@pytest.mark.parametrize(
    ("slow", "hot"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        (True, True),
    ],
)
@ranks(4)
def test_slow_and_hot_ranks_are_told_apart(slow: bool, hot: bool) -> None:
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate.record.run_folder import read
    from megatron_hecate.tools.run import Run

    folder = os.environ["TEST_FOLDER"] + "/run"
    settings = {} if hot else {"moe_router_force_load_balancing": True}
    case = tiny_gpt.Case(ep=4, skew=0.1 if hot else 0.0, settings=tuple(settings.items()))
    tiny_gpt.initialize(case)
    observe = fssdp(HecateConfig(observe=True, record=folder))

    def hook(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            pace = PACE if slow and dist.get_rank() == SLOW else 1
            _delay(layer.experts.local_experts, pace)
        return observe(chunks)

    trained = tiny_gpt.train(case, steps=STEPS, hook=hook)
    tiny_gpt.moe_layers(trained.chunks)[0].router.observer.stage.close()
    dist.barrier()
    record = read(folder)
    (found,) = Run(record).rank_speeds.values()
    assert [speed.is_slow for speed in found] == [slow and rank == SLOW for rank in range(4)], found
    if dist.get_rank() == 0:
        print(f"{slow=} {hot=}: {[(f'{s.pace:.2f}', f'{s.load:.2f}', s.verdict) for s in found]}")
    # Brute force over the recorded tokens, two experts a rank.
    of_ranks = record.load.reshape(STEPS, -1, 4, 2).sum(axis=(1, 3))
    shares = np.median(of_ranks / of_ranks.mean(axis=1, keepdims=True), axis=0)
    assert [speed.is_hot for speed in found] == [bool(share > 1.1) for share in shares], found
    assert found[0].is_hot == hot
    if slow:
        # A part of an expert's time is not slowed.
        assert 1.2 < found[SLOW].pace < 1.1 * PACE


@ranks(2)
def test_a_slow_rank_beside_replicas() -> None:
    """With replicas loads are even, and the slow rank remains slow."""
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate.record.run_folder import read
    from megatron_hecate.tools.run import Run

    folder = os.environ["TEST_FOLDER"] + "/run"
    case = tiny_gpt.Case(skew=3.0)
    tiny_gpt.initialize(case)
    switch_on = fssdp(HecateConfig(slots=2, speeds=tiny_gpt.FREE, record=folder))

    def hook(chunks: list) -> list:
        converted = switch_on(chunks)
        for layer in tiny_gpt.moe_layers(converted):
            # Replicas' modules have no hooks of their own. Of two ranks, a slow one lifts the mean
            # that it is compared with: 4 times the time is 1.6 times the mean.
            pace = 4 if dist.get_rank() == 1 else 1
            _delay(layer.experts.physical.twin.module.local_experts, pace)
        return converted

    trained = tiny_gpt.train(case, steps=STEPS, hook=hook)
    assert trained.replicas > 0
    tiny_gpt.moe_layers(trained.chunks)[0].prefetcher.monitor.recorder.stage.close()
    dist.barrier()
    (found,) = Run(read(folder)).rank_speeds.values()
    assert [speed.is_slow for speed in found] == [False, True], found
    assert not any(speed.is_hot for speed in found), found
