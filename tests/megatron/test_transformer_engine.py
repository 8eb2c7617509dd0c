"""Replicas in TEGroupedMLP over TransformerEngine's own Python, with only its compiled half in torch (`te_on_cpu`).
`test_layouts` has layouts of it.

Oracle: the same model without FSSDP, on the same ranks and data. What this cannot show is TransformerEngine's kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tiny_gpt
from layouts import BIAS, DISPATCH, SHARDED
from layouts import FUSED_WGRAD as FUSED
from ranks import ranks

pytestmark = pytest.mark.newest


@ranks(2, preload="te")
def test_a_linear_that_is_not_what_we_assume_is_refused() -> None:
    from megatron_hecate.megatron import assumptions

    case = tiny_gpt.initialized(grouped=True)
    chunks, _ = tiny_gpt.build(case)
    linear = tiny_gpt.moe_layers(chunks)[0].experts.linear_fc1
    for name in assumptions.TE_ASSUMPTIONS:
        value = getattr(linear, name)
        delattr(linear, name)
        message = f"TEGroupedMLP.linear_fc1 is a TEColumnParallelGroupedLinear without {name}; FSSDP needs Transformer"
        with pytest.raises(ValueError, match=message):
            tiny_gpt.fssdp_hook()(chunks)
        setattr(linear, name, value)
    experts = tiny_gpt.moe_layers(chunks)[0].experts
    experts._with_fused_impl, assumptions.FUSED_ASSUMPTIONS["gone"] = True, ""
    with pytest.raises(
        ValueError, match="TEGroupedMLP with use_transformer_engine_op_fuser lacks gone; set model"
    ):
        tiny_gpt.fssdp_hook()(chunks)
    experts._with_fused_impl = False
    tiny_gpt.fssdp_hook()(chunks)
    twin = tiny_gpt.moe_layers(chunks)[0].experts.physical.twin.module.linear_fc1
    for name in (
        "fp8_meta",
        "quantizers",
        "_fp8_workspaces",
        "_custom_quantizer_cache",
        "wgrad_store",
    ):
        assert getattr(twin, name) is not getattr(linear, name), name


@pytest.mark.parametrize(
    "with_replicas", [(True, False), (False, True)], ids=["replicas-homes", "homes-replicas"]
)
@ranks(2, preload="te")
def test_a_first_microbatch_without_replicas_or_with_them(with_replicas: tuple[bool, bool]) -> None:
    """One of two microbatches has replicas. TE overwrites ``main_grad`` in what it is told is the first; Megatron says
    so in the first forward of all, and in fp8 in that of each iteration, as here."""
    from megatron_hecate.step.prefetch import Prefetcher

    case = tiny_gpt.initialized(grouped=True, accumulate=2, settings=FUSED)
    tiny_gpt.install_fused_wgrad()
    fetch, fetches = Prefetcher._fetch, []

    def fetch_or_not(prefetcher: Prefetcher, state: Any) -> Any:
        fetches.append(state.index)
        return (
            fetch(prefetcher, state)
            if with_replicas[(fetches.count(state.index) - 1) % 2]
            else None
        )

    def begin_iteration(chunks: list, step: int) -> None:
        for layer in tiny_gpt.moe_layers(chunks):
            for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
                linear.is_first_microbatch = True

    stock = tiny_gpt.train(case, steps=4, before_step=begin_iteration)
    Prefetcher._fetch = fetch_or_not
    ours = tiny_gpt.train(
        case, steps=4, before_step=begin_iteration, hook=tiny_gpt.fssdp_hook(lifetime="layer")
    )
    tiny_gpt.assert_trained_alike(stock, ours)
    assert len(fetches) == 3 * 2 * 2, "the iterations after the first fetch twice in both layers"


@pytest.mark.slow
@pytest.mark.parametrize("with_", [dict(SHARDED), dict(settings=BIAS)], ids=["overlap", "bias"])
@ranks(2, preload="te")
def test_gradients_that_stock_takes_too_early(with_: dict[str, Any]) -> None:
    """Why `unsupported` has a rule on ``overlap_dispatch_backward_with_experts_wgrad``; it can go when this fails.
    Oracle: stock without that setting."""
    settings = {**FUSED, **with_.pop("settings", {})}
    case = tiny_gpt.initialized(grouped=True, accumulate=2, **with_, settings=settings)
    tiny_gpt.install_fused_wgrad()
    early = dataclasses.replace(case, settings=(*case.settings, *DISPATCH.items()))
    assert tiny_gpt.difference(tiny_gpt.train(case), tiny_gpt.train(early))["param"] > 1e-3
