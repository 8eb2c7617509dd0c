"""Replicas in TEGroupedMLP over TransformerEngine's own Python, with only its compiled half in torch (`te_on_cpu`).
`test_layouts` has layouts of it, also over grouped tensors, whose token counts stay on the GPU: it switches that path
on in modules of the installed Megatron, which passes counts of the host. Megatron 0.20 pads and passes counts by
``moe_use_grouped_tensor``.

Oracle: the same model without FSSDP, on the same ranks and data. What this cannot show is TransformerEngine's kernels.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import weakref
from pathlib import Path
from typing import Any

import operators_on_cpu
import pytest
import tiny_gpt
import torch
import variants
from layout_tables import LAYOUTS
from layouts import ALLGATHER, BIAS, DISPATCH, FUSED_WGRAD, SHARDED, Layout, flex
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

    case = tiny_gpt.initialized(grouped=True, accumulate=2, settings=FUSED_WGRAD)
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
    settings = {**FUSED_WGRAD, **with_.pop("settings", {})}
    case = tiny_gpt.initialized(grouped=True, accumulate=2, **with_, settings=settings)
    tiny_gpt.install_fused_wgrad()
    early = dataclasses.replace(case, settings=(*case.settings, *DISPATCH.items()))
    assert tiny_gpt.difference(tiny_gpt.train(case), tiny_gpt.train(early))["param"] > 1e-3


@ranks(2, preload="te")
def test_operators_keep_no_weights_of_earlier_forwards() -> None:
    """``use_transformer_engine_op_fuser``. Oracle: garbage collection."""
    from megatron_hecate.megatron.grouped_linear import GroupedTwin

    case, _ = variants.case_of(LAYOUTS["operators-fused-biases"])
    lent: dict[Any, list[list[weakref.ref]]] = {}
    compute = GroupedTwin.compute

    def watched(self: Any, weights: list[Any], *inputs: Any, **kwargs: Any) -> Any:
        lent.setdefault(self, []).append([weakref.ref(weight) for weight in weights])
        return compute(self, weights, *inputs, **kwargs)

    GroupedTwin.compute = watched
    trained = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(lifetime="layer"))
    assert trained.replicas > 0
    gc.collect()
    # forwards of one iteration share weights
    last = {id(weight()) for forwards in lent.values() for weight in forwards[-1]}
    earlier = [
        weight() for forwards in lent.values() for weights in forwards[:-1] for weight in weights
    ]
    kept = [weight for weight in earlier if weight is not None and id(weight) not in last]
    assert len(earlier) > 0 == len(kept)


@pytest.mark.parametrize(
    "modules",
    [pytest.param(["expert_fc1", "moe_act"], marks=pytest.mark.slow), ["fused_group_mlp"]],
)
@ranks(2, preload="te")
def test_offloaded_experts(modules: list[str]) -> None:
    """Megatron's fine-grained activation offloading. "GPU" and host are both the CPU: what is saved for the backward goes
    through it all the same, as copies, and the originals are released. Streams and overlap need a GPU."""
    operators_on_cpu.install()
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    tiny_gpt.install_fused_wgrad()  # for the attention
    settings = dict(
        fine_grained_activation_offloading=True,
        offload_modules=modules,
        use_transformer_engine_op_fuser="fused_group_mlp" in modules,
        min_offloaded_tensor_size=1,
        gradient_accumulation_fusion=True,
        num_layers=4,
        hidden_size=136,
        moe_ffn_hidden_size=72,
    )
    case = tiny_gpt.initialized(grouped=True, accumulate=2, settings=settings)
    handler = offload.ChunkOffloadHandler
    handler._can_manage_tensor_for_offload = staticmethod(
        lambda tensor: not isinstance(tensor, torch.nn.Parameter)
    )
    shapes: list[tuple[int, ...]] = []
    copy_away = handler.offload

    def noted(self: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        shapes.append(tuple(tensor.shape))
        return copy_away(self, tensor, *args, **options)

    handler.offload = noted

    def train(hook: Any) -> Any:
        offload.PipelineOffloadManager.reset_instance()
        shapes.clear()
        return tiny_gpt.train(case, hook=hook)

    stock = train(None)
    saved = (128, 144 if "fused_group_mlp" in modules else 72)  # before the activation, or after it
    assert saved in shapes, "some rank computes all tokens of a layer"
    for lifetime in ("iteration", "layer"):
        ours = train(tiny_gpt.fssdp_hook(lifetime=lifetime))
        tiny_gpt.assert_trained_alike(stock, ours, lifetime)
        assert shapes and not {(144, 136), (136, 72)} & {*shapes}, "weights are not offloaded"


@ranks(2, preload="te")
def test_padding_takes_as_many_experts_as_the_linears() -> None:
    """Empty slots are left out of a forward. Oracle: TE's own module, which asserts its number of splits."""
    from transformer_engine.pytorch import Fp8Padding

    case, _ = variants.case_of(Layout(2, {}, {}, experts="grouped tensors"))
    chunks, _ = tiny_gpt.build(case)
    experts = tiny_gpt.moe_layers(chunks)[0].experts
    experts.quantization_padding = Fp8Padding(4, align_size=16)
    tiny_gpt.fssdp_hook(slots=2)(chunks)
    experts.physical.twin.compute_first(5)
    rows, counts = torch.ones(9, 8), [3, 0, 1, 4, 1]
    padded, padded_counts = experts.physical.twin.module.quantization_padding(rows, counts)
    assert padded_counts == [16, 0, 16, 16, 16] and int(padded.sum()) == 9 * 8
    assert experts.quantization_padding.num_gemms == 4


def _megatron_takes_it() -> bool:
    """Read off the source: ranks are forked from processes that have not imported Megatron."""
    core = Path(importlib.util.find_spec("megatron.core").origin).parent
    return "moe_use_grouped_tensor" in (core / "transformer" / "transformer_config.py").read_text()


DISPATCHERS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": ALLGATHER,
    "deepep": flex("deepep"),
    "hybridep": flex("hybridep"),
    "hybridep-budget": flex("hybridep", moe_expert_rank_capacity_factor=32.0),
}


@pytest.mark.skipif(not _megatron_takes_it(), reason="before 0.20 counts are on the host")
@pytest.mark.parametrize("name", DISPATCHERS)
@ranks(2, preload="te")
def test_dispatchers(name: str) -> None:
    """By the setting: counts on the device, experts' rows padded by Megatron or by the dispatcher."""
    model = dict(DISPATCHERS[name], moe_use_grouped_tensor=True, **FUSED_WGRAD)
    layout = Layout(2, dict(accumulate=2), model, experts="grouped tensors")
    variants.compare(name, layout, layout.names)
