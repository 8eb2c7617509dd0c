"""Recipes of Megatron-Bridge, shrunk and on gloo ranks, through Bridge's own ``pretrain``.

Oracle: the same recipe without FSSDP, on the same ranks: losses, gradient norms and validation losses, bitwise without
replicas and to 1e-5 with them.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ranks import ranks
from small import GLM_AIR

FREE = str(Path(__file__).parent.parent / "free_copies.json")  # else no copy pays on so small a model


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of ``pretrain`` did: an entry an iteration, of losses by name and the gradient's norm; replicas."""

    steps: list[dict[str, float]]
    validation: list[dict[str, float]]
    replicas: Counter[str]

    def assert_same(self, other: Run, *, rel: float = 1e-5) -> None:
        assert len(self.steps) == len(other.steps), f"{len(self.steps)} steps, not {len(other.steps)}"
        for ours, theirs in zip(self.steps + self.validation, other.steps + other.validation, strict=True):
            assert ours == pytest.approx(theirs, rel=rel, abs=0) if rel else ours == theirs


def train(config: Any, *more: Any) -> Run:
    """Run ``pretrain`` on this rank, with ``more`` callbacks."""
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils import checkpoint_utils

    from megatron_hecate.tools.metrics import layer_metrics

    run = Run([], [], Counter())
    checkpoint_utils.read_train_state.cache_clear()  # a second load would find the state of the first run's end

    class Record(Callback):
        def on_train_step_end(self, context: Any) -> None:
            losses = {name: float(value) for name, value in context.loss_dict.items()}
            run.steps.append({**losses, "gradient": float(context.grad_norm)})
            run.replicas.update({layer.layer: layer.replicas for layer in layer_metrics(context.model)})

        def on_eval_end(self, context: Any) -> None:
            run.validation.append({name: float(value) for name, value in context.total_loss_dict.items()})

    pretrain(config, forward_step, callbacks=[Record(), *more])
    return run


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
        run(saved_on, "train.train_iters=2", f"checkpoint.save={folder}", "checkpoint.save_interval=2")
        for loaded_on in (False, True):
            resumed = run(loaded_on, f"checkpoint.load={folder}")
            resumed.assert_same(dataclasses.replace(whole, steps=whole.steps[2:]))
            assert bool(resumed.replicas.total()) == loaded_on


@ranks(4)
def test_two_pipeline_stages() -> None:
    from bridge_on_cpu import recipe

    from megatron_hecate import bridge

    overrides = ("model.pipeline_model_parallel_size=2", "train.train_iters=3")
    stock = train(recipe(*overrides))
    config = recipe(*overrides)
    bridge.enable(config, speeds=FREE)
    ours = train(config)
    ours.assert_same(stock)
    assert ours.replicas.total()


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
