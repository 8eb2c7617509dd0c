"""A forward under ``torch.inference_mode`` or ``no_grad`` changes nothing about the training around it.

Generation and log-probabilities run such forwards, outside of Megatron's schedule, before the first step and between
steps. Oracles: the same run without these forwards, bit for bit; and stock Megatron. Whatever stays on this rank after
them must be a normal tensor, but for what Megatron itself keeps.
"""

from __future__ import annotations

import gc
from typing import Any

import flex_backends
import pytest
import rehoming_hooks
import tiny_gpt
import torch
from layouts import ALLGATHER, flex
from quick import quick
from ranks import ranks

pytestmark = pytest.mark.newest

# models, when they evaluate, and settings of FSSDP
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "allgather": (ALLGATHER, "before and between", {}),
    "deepep": (flex("deepep"), "before and between", {}),
    "hybridep": (flex("hybridep"), "before and between", {}),
    # training has used it first
    "hybridep, later": (flex("hybridep"), "between", {}),
    "ncclep": (flex("ncclep"), "before and between", {}),
    "grouped": ({}, "before and between", {}),
    # then every dispatcher runs over physical experts, which move back where a state dict is read
    "moved homes": ({}, "before and between", dict(rehome=2)),
}


@pytest.mark.parametrize("name", quick(CASES, ["hybridep", "moved homes"]))
@ranks(2, preload=lambda name: "te" if name == "grouped" else "megatron")
def test_forwards_without_gradients(name: str) -> None:
    (model, when, settings), grouped = CASES[name], name == "grouped"
    flex_backends.install()
    case = tiny_gpt.initialized(grouped=grouped, skew=2.5, settings=flex_backends.valid(model))
    steps = 6 if settings else 3
    # first without: Megatron's global buffers would be inference tensors, and stock's allgather dispatcher fail
    stock, evaluated, _ = _train(case, None, when, torch.no_grad, steps=steps)
    _, _, kept_by_stock = _train(case, None, when, torch.inference_mode, steps=steps)
    alone, _, _ = _train(case, settings, "", torch.no_grad, steps=steps)
    assert alone.losses == pytest.approx(stock.losses, rel=1e-5) and alone.replicas > 0
    for mode in (torch.inference_mode, torch.no_grad):
        ours, outputs, kept = _train(case, settings, when, mode, steps=steps)
        assert kept <= kept_by_stock, kept - kept_by_stock
        assert tiny_gpt.difference(alone, ours) == tiny_gpt.SAME, mode
        assert outputs == pytest.approx(evaluated, rel=1e-5)


def _train(
    case: Any, settings: dict[str, Any] | None, when: str, mode: Any, *, steps: int
) -> tuple[Any, list[float], set[tuple]]:
    """Train; evaluate in ``mode`` around steps, as ``when`` says, and read a state dict in it once.

    Returns:
        The run, means of what it evaluated, and dtypes and shapes of the inference tensors that are left.
    """
    flex_backends.forget()
    moves = settings is not None and "rehome" in settings
    make = rehoming_hooks.rehoming_hook if moves else tiny_gpt.fssdp_hook
    run = tiny_gpt.train(case, steps=0, hook=None if settings is None else make(**settings))

    evaluated: list[float] = []

    def evaluate(step: int) -> None:
        with tiny_gpt.evaluating(run.chunks), mode():
            batch = iter([tiny_gpt.batch(case, 50 + step, 0)])
            output, _ = tiny_gpt.forward_step(batch, run.chunks[0], case=case)
            evaluated.append(float(output.float().mean()))

    if "before" in when:
        evaluate(0)
    for step in range(steps):
        run.step(step)
        if "between" in when and step < steps - 1:
            evaluate(step)
        if moves and step == steps - 3:
            with mode():
                # a collective, with homes where Megatron built them
                run.chunks[0].sharded_state_dict()
    run.read_params()
    mode = torch.no_grad
    evaluate(steps)  # dispatchers keep tensors of their last forward
    for layer in tiny_gpt.moe_layers(run.chunks) if moves else ():
        vars(layer.fssdp.stock_dispatcher).clear()  # once homes have moved, it runs no more
    gc.collect()
    left = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.is_inference()]
    return run, evaluated, {(t.dtype, t.shape) for t in left}
