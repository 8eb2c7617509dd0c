"""Homes of experts move in a recipe that Bridge trains: it trains as stock, and what leaves it is Megatron's own.

Oracle: the same recipe without FSSDP: losses, and weights that Bridge exports to Hugging Face's names while the model is
in memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from ranks import ranks
from recipe_runs import FREE, train

STEPS = "train.train_iters=6"


def moved(config: Any) -> Any:
    """``config`` with FSSDP, which looks for homes at every second iteration and finds others each time."""
    import moved_homes

    from megatron_hecate import bridge

    moved_homes.find()
    bridge.enable(config, speeds=FREE, rehome=2)
    return config


# 0.4 exports to a model of the hub only
@pytest.mark.newest
@ranks(2)
def test_export_of_a_model_in_memory() -> None:
    import moved_homes
    import torch
    from bridge_on_cpu import _model_of_the_hub, recipe
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.callbacks import Callback

    exported: list[dict[str, torch.Tensor]] = []
    elsewhere: list[bool] = []

    class Export(Callback):
        def on_train_end(self, context: Any) -> None:
            elsewhere.append(moved_homes.are_moved(context.model))
            hub = AutoBridge.from_hf_config(_model_of_the_hub("Qwen/Qwen3-30B-A3B"))
            weights = hub.export_hf_weights(context.model, cpu=True, show_progress=False)
            exported.append({name: weight.clone() for name, weight in weights})

    stock = train(recipe(STEPS), Export())
    ours = train(moved(recipe(STEPS)), Export())
    ours.assert_same(stock)
    assert elsewhere == [False, True]
    assert exported[0].keys() == exported[1].keys()
    assert sum(".experts." in name for name in exported[0]) >= 48
    for name, weight in exported[0].items():
        torch.testing.assert_close(exported[1][name], weight, rtol=0, atol=2e-5, msg=name)
