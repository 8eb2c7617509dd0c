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

# overrides, and how closely sums of replicas agree, which bf16 rounds in another order
PRECISIONS = {
    "fp32, with evaluation": (("validation.eval_iters=1", "validation.eval_interval=2"), 1e-5),
    "bf16, its own": (("mixed_precision=bf16_mixed",), 1e-3),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@ranks(2)
def test_qwen3_trains_and_evaluates_as_stock(precision: str) -> None:
    from bridge_on_cpu import recipe

    from megatron_hecate import bridge

    overrides, tolerance = PRECISIONS[precision]
    stock = train(recipe(*overrides))
    assert len(stock.steps) == 4 and not stock.replicas
    assert bool(stock.validation) == ("evaluation" in precision)
    for slots in (0, 2):
        config = recipe(*overrides)
        bridge.enable(config, slots=slots, speeds=FREE)
        ours = train(config)
        assert config.model.bf16 == ("bf16" in precision)
        ours.assert_same(stock, rel=tolerance if slots else 0)
        assert bool(ours.replicas.total()) == bool(slots)


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
        saving = (f"checkpoint.save={folder}", "checkpoint.save_interval=2")
        run(saved_on, "train.train_iters=2", *saving)
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
