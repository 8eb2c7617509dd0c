"""Homes of experts move while a model trains, with their optimizer state, and nobody can tell.

Oracle: stock Megatron, same ranks and settings: losses, norms and parameters. A test gives the homes that are wanted;
what would be chosen is the business of `tests/homes/test_planner.py`. Layouts and settings: `test_layouts`.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import rehoming_hooks
import tiny_gpt
import torch
import torch.distributed as dist
import training_with_moves
from ranks import ranks
from rehoming_hooks import rehoming_hook

from megatron_hecate.homes.planner import HomeSearch
from megatron_hecate.plan import Placement
from megatron_hecate.record.run_folder import read
from megatron_hecate.tools.run import Run


@ranks(4)
def test_gradients_are_clipped_by_their_norm() -> None:
    """It is summed in the order of places, so that not all bits are those of stock (`test_layouts`)."""
    case = tiny_gpt.initialized(
        distributed_optimizer=True, overlap=True, accumulate=2, optimizer=dict(clip_grad=0.1)
    )
    stock = tiny_gpt.train(case, steps=8)
    assert min(stock.grad_norms) > 0.1
    ours = tiny_gpt.train(case, steps=8, hook=rehoming_hook())
    assert ours.grad_norms == pytest.approx(stock.grad_norms, rel=1e-5)
    training_with_moves.restore(ours)
    ours.grads = stock.grads
    worst = tiny_gpt.difference(stock, ours)
    assert worst["loss"] < 1e-5 and worst["param"] < 1e-5, worst


def _rotated(look: int, num_experts: int) -> np.ndarray:
    """Every expert goes to the next rank."""
    return np.roll(np.arange(num_experts), look % 100 * num_experts // 4)


@pytest.mark.newest
@pytest.mark.slow
@ranks(4)
def test_all_experts_change_their_rank() -> None:
    """Then once more in rounds of one cycle each."""
    from megatron_hecate.homes import mover

    case = tiny_gpt.initialized(ep=4, distributed_optimizer=True, overlap=True)
    training_with_moves.compare(case, orders=_rotated, may_be_back=True, slots=0)
    mover.ROUND_BYTES = 1
    training_with_moves.compare(case, orders=_rotated, may_be_back=True)


@pytest.mark.newest
@ranks(2)
def test_the_homes_that_are_there_already() -> None:
    """Nothing moves where they are found again: the stock dispatcher stays in use."""
    case = tiny_gpt.initialized()
    stock = tiny_gpt.train(case, steps=5)
    ours = tiny_gpt.train(
        case, steps=5, hook=rehoming_hook(lambda _, size: np.arange(size), slots=0)
    )
    assert tiny_gpt.difference(stock, ours) == tiny_gpt.SAME
    layer = tiny_gpt.moe_layers(ours.chunks)[0]
    homes = layer.prefetcher.rehoming.homes
    assert rehoming_hooks.received_bytes == 0 and not homes.are_moved
    assert layer.token_dispatcher is layer.fssdp.stock_dispatcher


@ranks(2)
def test_a_record_knows_where_homes_were() -> None:
    """Oracles: the layers' homes after the last iteration; and the record's own loads, by Megatron's order before."""

    case = tiny_gpt.initialized(accumulate=2)
    folder = f"{os.environ['TEST_FOLDER']}/run"
    run = tiny_gpt.train(case, steps=8, hook=rehoming_hook(record=folder))
    monitor = tiny_gpt.moe_layers(run.chunks)[0].prefetcher.monitor
    monitor.collect()
    monitor.recorder.stage.close()
    torch.distributed.barrier()
    record = read(folder)
    figures = Run(record)
    built = np.repeat(np.arange(2), 4)
    assert (figures.home[:3] == built).all() and len(record.load) == 8
    for layer, module in enumerate(tiny_gpt.moe_layers(run.chunks)):
        assert (figures.home[-1, layer] == module.fssdp.homes.home).all() and (
            figures.home[-1, layer] != built
        ).any()
    assert (figures.after.sum(axis=2) == record.load.sum(axis=2)).all()
    assert (figures.before[..., 0] == record.load[..., :4].sum(axis=2)).all()
    assert np.isfinite(figures.price_ms).all()
    # the first is Megatron's
    changed = [int((figures.home[t] != figures.home[t - 1]).sum()) for t in range(1, 8)]
    assert figures.moves == sum(changed) > 0


@ranks(4)
def test_ranks_share_the_search() -> None:
    """Oracle: one rank that looks at all layers by itself."""
    from megatron_hecate.homes import schedule

    looked_at: list[list[int]] = []
    found: list[int] = []

    class Shared(HomeSearch):
        def __init__(self, **fields: Any) -> None:
            # Tokens so slow that everything pays, without room for replicas, which would leave
            # nothing to win.
            fields |= {"token_seconds": 1.0, "homes": Placement.initial(8, 2, num_slots=0)}
            super().__init__(**fields)

        def choose(self, load: np.ndarray, order: np.ndarray, layers: Any) -> list:
            self.__dict__["load"] = load
            looked_at.append(list(layers))
            return super().choose(load, order, layers)

        def afford(self, choices: list, order: np.ndarray) -> Any:
            alone = super().choose(self.__dict__["load"], order, range(len(order)))
            found.append(len(alone))
            for ours, theirs in zip(choices, alone, strict=True):
                assert ours.layer == theirs.layer and ours.saved == theirs.saved
                np.testing.assert_array_equal(ours.order, theirs.order)
            return super().afford(choices, order)

    schedule.HomeSearch = Shared
    case = tiny_gpt.initialized(ep=2)
    tiny_gpt.train(case, steps=8, hook=tiny_gpt.fssdp_hook(rehome=3, slots=1))
    assert looked_at == [[[0], [1], [], []][dist.get_rank()]] * 2
    assert max(found) > 0
