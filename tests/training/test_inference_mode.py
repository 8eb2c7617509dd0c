"""A forward under ``torch.inference_mode`` or ``no_grad`` changes nothing about the training around it.

Generation and log-probabilities run such forwards, outside of Megatron's schedule, before the first step and between
steps. Oracles: the same run without these forwards, bit for bit; and stock Megatron. Whatever stays on this rank after
them must be a normal tensor, but for what Megatron itself keeps.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from quick import quick
from ranks import ranks

DISPATCHERS: dict[str, dict[str, Any]] = {
    "alltoall": dict(moe_token_dispatcher_type="alltoall"),
    "allgather": dict(moe_token_dispatcher_type="allgather"),
    "deepep": dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep"),
    "hybridep": dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep"),
    "ncclep": dict(
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="ncclep",
        moe_expert_rank_capacity_factor=2.0,
    ),
}


@pytest.mark.newest
@pytest.mark.parametrize("name", quick(DISPATCHERS, ["hybridep"]))
@ranks(2)
def test_every_dispatcher(name: str) -> None:
    import flex_backends
    import tiny_gpt

    flex_backends.install()
    tiny_gpt.initialize(tiny_gpt.Case())
    _compare(name, "before and between", grouped=False)


@pytest.mark.newest
@pytest.mark.slow
@ranks(2)
def test_a_dispatcher_that_training_has_used_first() -> None:
    import flex_backends
    import tiny_gpt

    flex_backends.install()
    tiny_gpt.initialize(tiny_gpt.Case())
    _compare("hybridep", "between", grouped=False)


@pytest.mark.newest
@pytest.mark.parametrize("name", quick(["alltoall", "hybridep"], []))
@ranks(2, preload="te")
def test_grouped_experts(name: str) -> None:
    import te_on_cpu

    te_on_cpu.install()
    import flex_backends
    import tiny_gpt

    flex_backends.install()
    tiny_gpt.initialize(tiny_gpt.Case())
    _compare(name, "before and between", grouped=True)


@pytest.mark.newest
@pytest.mark.parametrize("slots", [pytest.param(0, marks=pytest.mark.slow), 2])
@ranks(2)
def test_homes_that_have_moved(slots: int) -> None:
    """Then every dispatcher runs over physical experts, and experts are moved back where a state dict is read."""
    import tiny_gpt

    tiny_gpt.initialize(tiny_gpt.Case())
    _compare("alltoall", "before and between", grouped=False, slots=slots, rehome=2)


def _compare(name: str, when: str, *, grouped: bool, slots: int = 2, **settings: Any) -> None:
    import flex_backends
    import tiny_gpt
    import torch

    settings_of = tuple(flex_backends.valid(DISPATCHERS[name]).items())
    case = tiny_gpt.Case(grouped=grouped, skew=2.5, settings=settings_of)
    steps = 6 if settings else 3
    # first without: Megatron's global buffers would be inference tensors, and stock's allgather dispatcher fail
    stock, _ = _train(case, None, when, torch.no_grad, steps=steps)
    _, kept_by_stock = _train(case, None, when, torch.inference_mode, steps=steps)
    alone, _ = _train(case, dict(slots=slots, **settings), "", torch.no_grad, steps=steps)
    assert alone.losses == pytest.approx(stock.losses, rel=1e-5) and (alone.replicas > 0) == (
        slots > 0
    )
    for mode in (torch.inference_mode, torch.no_grad):
        ours, kept = _train(case, dict(slots=slots, **settings), when, mode, steps=steps)
        assert kept <= kept_by_stock, kept - kept_by_stock
        assert tiny_gpt.difference(alone, ours) == tiny_gpt.SAME, (name, mode)


def _train(
    case: Any, settings: dict[str, Any] | None, when: str, mode: Any, *, steps: int
) -> tuple[Any, set[tuple]]:
    """Train; evaluate in ``mode`` around steps, as ``when`` says, and read a state dict in it once.

    Returns:
        The run, and dtypes and shapes of the inference tensors that are left.
    """
    import flex_backends
    import rehoming_hooks
    import tiny_gpt
    import torch

    flex_backends.forget()
    moves = settings is not None and "rehome" in settings
    make = rehoming_hooks.rehoming_hook if moves else tiny_gpt.fssdp_hook
    run = tiny_gpt.train(case, steps=0, hook=None if settings is None else make(**settings))

    def evaluate(step: int) -> None:
        with tiny_gpt.evaluating(run.chunks), mode():
            batch = iter([tiny_gpt.batch(case, 50 + step, 0)])
            tiny_gpt.forward_step(batch, run.chunks[0], case=case)

    if "before" in when:
        evaluate(0)
    for step in range(steps):
        run.step(step)
        if "between" in when and step < steps - 1:
            evaluate(step)
        if moves and step == steps - 3:
            with mode():
                run.chunks[
                    0
                ].sharded_state_dict()  # a collective, with homes where Megatron built them
    run.read_params()
    mode = torch.no_grad
    evaluate(steps)  # dispatchers keep tensors of their last forward
    for layer in tiny_gpt.moe_layers(run.chunks) if moves else ():
        vars(layer.fssdp.stock_dispatcher).clear()  # once homes have moved, it runs no more
    gc.collect()
    left = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.is_inference()]
    return run, {(t.dtype, t.shape) for t in left}
