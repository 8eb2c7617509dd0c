"""Recipes of Megatron-Bridge, shrunk and on gloo ranks, through Bridge's own ``pretrain``.

Oracle: the same recipe without FSSDP, on the same ranks: losses, gradient norms and validation losses, bitwise without
replicas and to 1e-5 with them; and weights that Bridge exports to Hugging Face's names.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import bridge_on_cpu
import pytest
import rehoming_hooks
import torch
from ranks import ranks
from recipe_runs import GLM_AIR, Run, train

# overrides, and how closely sums of replicas agree, which bf16 rounds in another order
PRECISIONS = {
    "fp32, with evaluation": (("validation.eval_iters=1", "validation.eval_interval=2"), 1e-5),
    "bf16, its own": (("mixed_precision=bf16_mixed",), 1e-3),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@ranks(2)
def test_qwen3_trains_and_evaluates_as_stock(precision: str) -> None:
    overrides, tolerance = PRECISIONS[precision]
    stock = train(bridge_on_cpu.recipe(*overrides))
    assert len(stock.steps) == 4 and not stock.replicas
    assert bool(stock.validation) == ("evaluation" in precision)
    for slots in (0, 2):
        config = bridge_on_cpu.enabled(*overrides, slots=slots)
        ours = train(config)
        assert config.model.bf16 == ("bf16" in precision)
        ours.assert_same(stock, rel=tolerance if slots else 0)
        assert bool(ours.replicas.total()) == bool(slots)


@ranks(2)
def test_a_checkpoint_resumes_in_all_four_directions() -> None:
    def run(on: bool, *overrides: str) -> Run:
        return train((bridge_on_cpu.enabled if on else bridge_on_cpu.recipe)(*overrides))

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
    stock = train(bridge_on_cpu.recipe(name=GLM_AIR))
    ours = train(bridge_on_cpu.enabled(name=GLM_AIR))
    ours.assert_same(stock)
    assert ours.replicas["layer 2"] and ours.replicas["mtp layer 1"], ours.replicas


# 0.4 exports to a model of the hub only
@pytest.mark.newest
@ranks(2)
def test_export_of_a_model_in_memory_while_experts_are_elsewhere() -> None:
    """FSSDP looks for homes at every second iteration, and finds others each time."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.callbacks import Callback

    exported: list[dict[str, torch.Tensor]] = []
    elsewhere: list[bool] = []

    class Export(Callback):
        def on_train_end(self, context: Any) -> None:
            elsewhere.append(rehoming_hooks.are_moved(context.model))
            hub = AutoBridge.from_hf_config(bridge_on_cpu.model_of_the_hub("Qwen/Qwen3-30B-A3B"))
            weights = hub.export_hf_weights(context.model, cpu=True, show_progress=False)
            exported.append({name: weight.clone() for name, weight in weights})

    rehoming_hooks.find()
    stock = train(bridge_on_cpu.recipe("train.train_iters=6"), Export())
    ours = train(bridge_on_cpu.enabled("train.train_iters=6", rehome=2), Export())
    ours.assert_same(stock)
    assert elsewhere == [False, True]
    assert sum(".experts." in name for name in exported[0]) >= 48
    torch.testing.assert_close(exported[1], exported[0], rtol=0, atol=2e-5)
