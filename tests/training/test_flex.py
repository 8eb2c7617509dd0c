"""Megatron's ``flex`` dispatcher over each library. Oracle: the same model, not converted, over the same one.

Megatron's managers and autograd functions run as they are; the libraries behind them are those of `flex_backends`. What
this cannot show: the libraries themselves, which need GPUs. `test_layouts` trains with each.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import budgeted
import flex_backends
import numpy as np
import operators_on_cpu
import pytest
import tiny_gpt
import torch.distributed as dist
from layouts import PADDED, flex
from quick import quick
from ranks import ranks
from routed_tokens import recorded_run


def _case(model: dict[str, Any], **fields: Any) -> Any:
    flex_backends.install()
    case = tiny_gpt.initialized(**fields, settings=flex_backends.valid(model))
    return case


@pytest.mark.parametrize("backend", quick(["deepep", "ncclep"], ["ncclep"], oldest=["deepep"]))
@ranks(2)
def test_choices_of_probability_zero(backend: str) -> None:
    """Both backends send a token to its largest probabilities: one that underflowed must stay the choice it was."""
    case = _case(flex(backend), skew=1e4)
    stock = tiny_gpt.train(case)
    flex_backends.forget()
    received: list[int] = []

    def watched(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(tiny_gpt.fssdp_hook()(chunks)):
            layer.experts.register_forward_pre_hook(
                lambda _, inputs: received.append(int(inputs[1].sum()))
            )
        return chunks

    ours = tiny_gpt.train(case, hook=watched)
    tiny_gpt.assert_trained_alike(stock, ours)
    assert received[2:] == [64] * 4, (
        "two layers, two steps with replicas: both ranks compute half of 2 x 64 choices"
    )


@ranks(2)
def test_padding_to_capacity_is_not_recorded_as_tokens() -> None:
    """Without replicas Megatron's own dispatcher pads. Oracle: rows whose probability is not zero."""

    case, folder = _case(flex("hybridep", **PADDED)), f"{os.environ['TEST_FOLDER']}/run"
    rows: list[tuple[int, int]] = []  # all, and tokens among them

    def watched(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(tiny_gpt.fssdp_hook(slots=0, record=folder)(chunks)):
            layer.experts.register_forward_pre_hook(
                lambda _, inputs: rows.append((len(inputs[0]), int((inputs[2] != 0).sum())))
            )
        return chunks

    run = tiny_gpt.train(case, hook=watched)
    record = recorded_run(run.chunks, folder)
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, rows)
    if dist.get_rank() == 0:
        # [T, L, N] each
        every, tokens = np.array(of_ranks).reshape(2, 3, 2, 2).transpose(3, 1, 2, 0)
        assert (every > tokens).all()
        assert record.rank_load.tolist() == tokens.tolist()


@pytest.mark.newest
@ranks(2)
def test_nccl_ep_that_drops_tokens_is_refused() -> None:
    chunks, config = tiny_gpt.build(_case(flex("ncclep")))
    # 0.20 refuses it while it builds the model
    config.moe_expert_capacity_factor = 1.0
    with pytest.raises(ValueError, match=r"moe_expert_capacity_factor=1\.0: NCCL EP .* set model"):
        tiny_gpt.fssdp_hook()(chunks)


@pytest.mark.newest
@ranks(2, preload="te")
def test_under_a_budget_of_tokens_copies_pay() -> None:
    """Copies that are too slow to pay are made where a rank would get more tokens than fit."""
    operators_on_cpu.install()
    case = _case(flex("hybridep", use_transformer_engine_op_fuser=True), grouped=True)
    operators_on_cpu.leave_out_empty_rows()
    has_replicas = []
    for factor in (None, 32.0, 1.2):
        budget = dict(case.settings, moe_expert_rank_capacity_factor=factor)
        budgeted = dataclasses.replace(case, settings=tuple(budget.items()))
        run = tiny_gpt.train(budgeted, hook=tiny_gpt.fssdp_hook(speeds=None))
        has_replicas.append(tiny_gpt.num_replicas(run.chunks) > 0)
        flex_backends.forget()
    assert has_replicas == [False, False, True]


@pytest.mark.newest
@ranks(2, preload="te")
def test_the_budget_that_suffices_is_recorded() -> None:
    """Rows of the experts' input include padding here. Oracle: tokens that each rank is given in each microbatch."""
    operators_on_cpu.install()
    budget = dict(moe_expert_rank_capacity_factor=32.0, use_transformer_engine_op_fuser=True)
    case = _case(flex("hybridep", **budget), grouped=True, accumulate=2, skew=3)
    operators_on_cpu.leave_out_empty_rows()
    received: list[int] = []
    folder = f"{os.environ['TEST_FOLDER']}/run"

    def watched(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(tiny_gpt.fssdp_hook(record=folder)(chunks)):
            layer.experts.register_forward_pre_hook(
                lambda _, inputs: received.append(int(inputs[1].sum()))
            )
        return chunks

    run = tiny_gpt.train(case, steps=4, hook=watched)
    record = recorded_run(run.chunks, folder)
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, received)
    tokens = np.array(of_ranks).reshape(2, 4, 2, 2)  # [N, T, M, L]
    largest = (tokens.max(axis=0) / tokens.mean(axis=0)).max(axis=1)
    assert np.allclose(record.factor, largest, rtol=0, atol=2e-5)
    # no replicas in the first iteration
    assert np.allclose(record.factor[0], record.stock_factor[0], rtol=0, atol=2e-5)
    assert (record.replica[1:] >= 0).any() and (record.factor < record.stock_factor).any()


@pytest.mark.newest
@pytest.mark.slow
@ranks(2, preload="te")
def test_a_budget_of_tokens_per_rank() -> None:
    """``moe_expert_rank_capacity_factor``: a step in which some rank gets more is run again without the budget, by
    Megatron's own runner. Stock overflows in every step; ours only until there are replicas."""
    operators_on_cpu.install()
    from megatron.core.transformer.moe import token_dispatcher

    budget = dict(moe_expert_rank_capacity_factor=1.15, use_transformer_engine_op_fuser=True)
    case = _case(flex("hybridep", **budget), grouped=True, accumulate=2)
    # 256 is more than this model's tokens
    token_dispatcher.get_align_size_for_quantization = lambda config: 16
    operators_on_cpu.leave_out_empty_rows()

    stock, stock_ran_again = budgeted.train(case, steps=4)
    flex_backends.forget()
    ours, ours_ran_again = budgeted.train(case, steps=4, hook=tiny_gpt.fssdp_hook())
    tiny_gpt.assert_trained_alike(stock, ours)
    assert (stock_ran_again, ours_ran_again) == ([0, 1, 2, 3], [0])
