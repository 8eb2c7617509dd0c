"""Recipes of Megatron-Bridge, shrunk and on gloo ranks, through Bridge's own ``pretrain``.

Oracle: the same recipe without FSSDP, on the same ranks: losses, gradient norms and validation losses, bitwise without
replicas and to 1e-5 with them.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
from ranks import ranks
from recipe_runs import FREE, GLM_AIR, Run, train


@ranks(2)
def test_qwen3_trains_and_evaluates_as_stock() -> None:
    from bridge_on_cpu import recipe

    from megatron_hecate import bridge

    overrides = ("validation.eval_iters=1", "validation.eval_interval=2")
    stock = train(recipe(*overrides))
    assert len(stock.steps) == 4 and stock.validation and not stock.replicas
    for slots in (0, 2):
        config = recipe(*overrides)
        bridge.enable(config, slots=slots, speeds=FREE)
        ours = train(config)
        ours.assert_same(stock, rel=1e-5 if slots else 0)
        assert bool(ours.replicas.total()) == bool(slots)


@ranks(2)
def test_qwen3_in_its_own_precision() -> None:
    """bf16 with fp32 main gradients: sums of replicas are rounded in another order."""
    from bridge_on_cpu import recipe

    from megatron_hecate import bridge

    stock = train(recipe("mixed_precision=bf16_mixed"))
    for slots in (0, 2):
        config = recipe("mixed_precision=bf16_mixed")
        bridge.enable(config, slots=slots, speeds=FREE)
        ours = train(config)
        assert config.model.bf16
        ours.assert_same(stock, rel=1e-3 if slots else 0)


@ranks(2)
def test_a_checkpoint_resumes_in_all_four_directions() -> None:
    from bridge_on_cpu import recipe

    from megatron_hecate import bridge

    def run(on: bool, *overrides: str) -> Run:
        config = recipe(*overrides)
        if on:
            bridge.enable(config, speeds=FREE)
        return train(config)

    whole = run(False)
    for saved_on in (False, True):
        folder = f"{os.environ['TEST_FOLDER']}/{saved_on}"
        run(
            saved_on,
            "train.train_iters=2",
            f"checkpoint.save={folder}",
            "checkpoint.save_interval=2",
        )
        for loaded_on in (False, True):
            resumed = run(loaded_on, f"checkpoint.load={folder}")
            resumed.assert_same(dataclasses.replace(whole, steps=whole.steps[2:]))
            assert bool(resumed.replicas.total()) == loaded_on


@pytest.mark.newest
@ranks(2)
def test_multi_token_prediction() -> None:
    from bridge_on_cpu import recipe

    from megatron_hecate import bridge

    stock = train(recipe(name=GLM_AIR))
    config = recipe(name=GLM_AIR)
    bridge.enable(config, speeds=FREE)
    ours = train(config)
    ours.assert_same(stock)
    assert ours.replicas["layer 2"] and ours.replicas["mtp layer 1"], ours.replicas
