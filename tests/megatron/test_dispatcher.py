"""Budgets of tokens per rank. Oracle: how Megatron's managers of 0.19.2 size and align their buffers, by hand."""

from __future__ import annotations

import types

import pytest

from megatron_hecate.plan import load_limit


@pytest.mark.newest
@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        (dict(moe_expert_rank_capacity_factor=None), (None, 1)),
        (
            dict(
                moe_token_dispatcher_type="alltoall",
                moe_expert_rank_capacity_factor=None,
                fp8="e4m3",
            ),
            (None, 1),
        ),
        (dict(), (1.5, 1)),
        (dict(fp8="e4m3", fp8_recipe="mxfp8"), (1.5, 32)),
        (dict(fp8="e4m3", fp8_recipe="mxfp8", use_transformer_engine_op_fuser=True), (1.5, 256)),
        # HybridEP pads nothing in bf16, NCCL EP for the op fuser
        (dict(use_transformer_engine_op_fuser=True), (1.5, 1)),
        (
            dict(moe_flex_dispatcher_backend="ncclep", use_transformer_engine_op_fuser=True),
            (1.5, 256),
        ),
        (dict(moe_flex_dispatcher_backend="ncclep"), (1.5, 1)),
        # two sources' tokens, of which HybridEP counts one's
        (dict(tp_size=2), (0.75, 1)),
        (dict(tp_size=2, moe_flex_dispatcher_backend="ncclep"), (1.5, 1)),
    ],
)
def test_the_budget_and_its_padding(settings: dict, budget: tuple) -> None:
    from megatron_hecate.megatron.dispatcher import expert_alignment, rank_budget

    usual = dict(
        moe_expert_rank_capacity_factor=1.5, moe_flex_dispatcher_backend="hybridep", tp_size=1
    )
    usual |= dict(
        moe_token_dispatcher_type="flex", fp8=None, fp4=None, use_transformer_engine_op_fuser=False
    )
    config = types.SimpleNamespace(**(usual | settings))
    dispatcher = types.SimpleNamespace(config=config, tp_size=config.tp_size)
    assert (rank_budget(dispatcher), expert_alignment(config)) == budget


@pytest.mark.fast
def test_padding_and_the_error_of_the_forecast_come_off_the_budget() -> None:
    """DeepSeek-V3 on 64 ranks with two slots: 6 experts of a rank, 255 of 32,768 rows each at worst."""
    arguments = dict(rows=32768.0, experts=6)
    assert load_limit(1.5, alignment=1, **arguments) == pytest.approx(1.2)
    assert load_limit(1.5, alignment=256, **arguments) == pytest.approx(1.2 - 6 * 255 / 32768)
