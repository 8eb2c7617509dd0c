"""What FSSDP says when it cannot be switched on, and that the model is then as it was. Oracle: literal messages.

Each test starts from a stock model of two MoE layers with 8 experts on two ranks.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from model_state import refusal, snapshot
from ranks import ranks

from megatron_hecate.switch_on import unsupported


def test_a_way_in_that_does_not_fit_lists_what_is_gone() -> None:
    from megatron_hecate.megatron import assumptions

    parser = assumptions.TRAINING_ASSUMPTIONS[0]
    assumptions.require((parser,), module="megatron_hecate.enable", by="Megatron")
    gone = dataclasses.replace(parser, name="training.arguments:no_parser")
    without = dataclasses.replace(parser, takes=("no_argument",))
    message = (
        r"^megatron_hecate\.enable does not fit this Megatron:\n"
        r"  - megatron\.training\.arguments:no_parser \(.*\) is gone: module .*\n"
        r"  - megatron\..* no longer takes no_argument$"
    )
    with pytest.raises(ImportError, match=message):
        assumptions.require((gone, without), module="megatron_hecate.enable", by="Megatron")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.15.0rc8", False),
        # main after the branch of 0.16, which Primus pins
        ("0.16.0rc0", True),
        ("0.16.0", False),
        ("0.16.1", True),
        ("0.19.2+91b6a64", True),
        ("0.21.0.dev0", False),
        ("main", False),
    ],
)
def test_versions_of_megatron(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_hecate.megatron import assumptions

    monkeypatch.setattr("megatron.core.__version__", version)
    problems = assumptions.broken_assumptions(())
    assert problems == ([] if fits else [f"megatron-core {version} is outside 0.16.1 to 0.20"])


@ranks(2)
def test_ep_of_one() -> None:
    case = tiny_gpt.initialized(ep=1)
    chunks, _ = tiny_gpt.build(case)
    before = snapshot(chunks)
    assert re.search(
        r"expert_model_parallel_size=1: .* or --expert-model-parallel-size 2", refusal(chunks)
    )
    assert snapshot(chunks) == before


@ranks(2)
def test_too_many_slots_and_no_file_with_speeds() -> None:
    chunks, _ = tiny_gpt.build(tiny_gpt.initialized())
    text = refusal(chunks, slots=5, speeds=__file__)
    assert re.search(
        r"layers 1-2: slots=5 is out of range: .* 4 of 8 experts can host 0 to 4 replicas", text
    )
    assert f"  - speeds: {__file__} does not hold measured speeds" in text


@ranks(2)
def test_every_unsupported_setting_is_listed_at_once() -> None:
    chunks, config = tiny_gpt.build(tiny_gpt.initialized())
    config.fp8, config.fp4 = "hybrid", "e2m1"  # without them no recipe is refused
    config.use_transformer_engine_op_fuser, config.moe_token_dispatcher_type = True, "flex"
    planted = dict(
        fp8_recipe="delayed",
        fp4_recipe="custom",
        moe_grouped_gemm=False,  # with fp8
        cuda_graph_impl="local",
        enable_cuda_graph=True,
        external_cuda_graph=True,
        moe_single_grouped_weight=True,
        moe_single_grouped_bias=True,
        moe_use_legacy_grouped_gemm=True,
        moe_flex_dispatcher_backend="deepepv2",
        moe_router_score_function="gumbel",
        moe_router_dtype="fp8",
        mlp_chunks_for_training=2,
        use_kitchen=True,
        overlap_dispatch_backward_with_experts_wgrad=True,  # and gradients are not fused
        moe_dispatch_fwd_dtype="fp8",
        moe_combine_bwd_dtype="fp8",
        moe_ncclep_zero_copy=True,
        moe_ncclep_use_symm_mem=True,
        moe_megakernel_backend="mok",
        moe_use_offloading_experts=True,
        moe_shortcut_connection=True,
        moe_router_topk_mode="seq_topk",
        mxfp8_2d_quantization=True,
        fp8_recipe_attrs="custom",
        fp4_recipe_attrs="custom",
        cpu_offloading=True,
        gtp_weight_remat_size=2,
        expert_gtp_weight_remat_size=2,
        transformer_impl="inference_optimized",
        restore_modelopt_state=True,
    )
    for name, value in planted.items():
        setattr(config, name, value)
    text = refusal(chunks)
    for name, value in planted.items():
        assert f"  - --moe-fssdp with {name}={value!r}: " in text
    assert text.count("\n") == len(planted)
    config.use_transformer_engine_op_fuser, config.moe_token_dispatcher_type = False, "alltoallv"
    config.moe_use_grouped_tensor = True  # in fp8, without the op fuser
    others = dict(moe_token_dispatcher_type="alltoallv", moe_use_grouped_tensor=True)
    text = refusal(chunks)
    for name, value in others.items():
        assert f"  - --moe-fssdp with {name}={value!r}: " in text
    iteration = dict(cuda_graph_warmup_steps=0, moe_enable_routing_replay=True)
    for name, value in dict(iteration, cuda_graph_impl="full_iteration").items():
        setattr(config, name, value)
    text = refusal(chunks, late_replicas=2, rehome=3)
    iteration |= dict(moe_fssdp_late_replicas=2, moe_fssdp_rehome=3)
    for name, value in iteration.items():
        assert f"  - --moe-fssdp with {name}={value!r}: " in text
    assert {rule.setting for rule in unsupported.MODEL} == {*planted, *others}


@pytest.mark.parametrize("backend", ["mok", "of_later"])
@ranks(2)
def test_a_layer_whose_kernel_holds_the_experts(backend: str) -> None:
    """As Megatron builds it with a megakernel: neither dispatcher nor experts, and a forward of the layer's own."""
    chunks, config = tiny_gpt.build(tiny_gpt.initialized())
    config.moe_megakernel_backend = backend
    for layer in tiny_gpt.moe_layers(chunks):
        layer.experts = layer.token_dispatcher = None
    before = snapshot(chunks)
    problem = (
        f"--moe-fssdp with moe_megakernel_backend={backend!r}: one kernel for dispatch, experts and "
        "combine computes no replicas; set model.moe_megakernel_backend=null "
        "or leave out --moe-megakernel-backend"
    )
    text = refusal(chunks)
    assert text.splitlines()[1:] == [f"  - {problem}"]
    with pytest.raises(ValueError, match="layer 1, layer 2: no experts to observe, because one"):
        tiny_gpt.fssdp_hook(observe=True, slots=0)(chunks)
    assert snapshot(chunks) == before


@pytest.mark.fast
def test_every_source_is_read_and_both_overrides_are_named() -> None:
    model = SimpleNamespace(expert_model_parallel_size=2, cuda_graph_impl="local")
    recipe = SimpleNamespace(peft=SimpleNamespace(), ddp=SimpleNamespace(use_megatron_fsdp=True))
    problems = unsupported.find(model, recipe.ddp, {"use_torch_fsdp2": True}, recipe, None, slots=2)
    ways_out = {
        "cuda_graph_impl='local'": "set model.cuda_graph_impl=none or --cuda-graph-impl none",
        "use_megatron_fsdp=True": "set ddp.use_megatron_fsdp=false and dist.use_megatron_fsdp=false or leave out "
        "--use-megatron-fsdp",
        "use_torch_fsdp2=True": "set dist.use_torch_fsdp2=false or leave out --use-torch-fsdp2",
        "peft=SimpleNamespace": "or set its peft to None in Python, for which Bridge takes no override",
    }
    for problem, (setting, way_out) in zip(problems, ways_out.items(), strict=True):
        assert problem.startswith(f"--moe-fssdp with {setting}: ") and problem.endswith(way_out)
    dispatch = {
        "overlap_dispatch_backward_with_experts_wgrad": True,
        "gradient_accumulation_fusion": True,
    }
    assert not unsupported.find(dispatch, slots=0)
    for breaks in ({"overlap_grad_reduce": True}, {"add_bias_linear": True}):
        assert (
            "set model.overlap_dispatch_backward" in unsupported.find(dispatch, breaks, slots=0)[0]
        )
    assert not unsupported.find({"expert_model_parallel_size": 2}, slots=2)
    assert not unsupported.find(slots=0), "with slots=0 EP 1 trains as stock"


@pytest.mark.newest
@pytest.mark.fast
@pytest.mark.parametrize("kind", ["", "expert_"])
def test_weight_shards_are_undone_by_both_overrides_together(kind: str) -> None:
    """Oracle: ``TransformerConfig``, which derives the one field from the other each time it is finalized."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    size = dict(num_layers=2, hidden_size=64, num_attention_heads=4)
    config = TransformerConfig(**size, **{f"{kind}tensor_parallel_num_weight_shards": 2})
    (problem,) = unsupported.find(config, slots=0)
    assert f"with {kind}gtp_weight_remat_size=2: " in problem
    for name, value in re.findall(r"model\.(\w+)=(\w+)", problem):
        setattr(config, name, {"1": 1, "null": None}[value])
    config.__post_init__()
    assert not unsupported.find(config, slots=0)


@pytest.mark.fast
def test_the_page_on_compatibility_names_each_setting() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text()
    missing = [rule.setting for rule in unsupported.RULES if f"`{rule.setting}" not in page]
    assert not missing


@ranks(2)
def test_ranks_with_other_settings_are_named() -> None:
    chunks, _ = tiny_gpt.build(tiny_gpt.initialized())
    for name, values, message in (
        ("slots", (2, 3), "rank 1 has slots=3, rank 0 has slots=2"),
        (
            "transport",
            ("auto", "nvlink"),
            "rank 1 has transport='nvlink', rank 0 has transport='auto'",
        ),
        (
            "speeds",
            (None, tiny_gpt.FREE),
            r"rank 1 has speeds=\{.*1e\+18.*\}, rank 0 has speeds=\{",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_gpt.fssdp_hook(**{name: values[dist.get_rank()]})(chunks)


@ranks(2)
def test_another_megatron_is_an_error_with_a_list() -> None:
    import megatron.core
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_hecate.megatron import assumptions

    chunks, _ = tiny_gpt.build(tiny_gpt.initialized())
    version, route = megatron.core.__version__, MoELayer.route
    assert assumptions.broken_assumptions() == []
    megatron.core.__version__ = "0.15.3"
    MoELayer.route = lambda self, x: None
    del MoELayer.preprocess
    text = refusal(chunks)
    assert "megatron-core 0.15.3 is outside 0.16.1 to 0.20" in text
    assert re.search(r"MoELayer.route \(overridden.*\) no longer takes hidden_states", text)
    assert re.search(r"MoELayer.preprocess \(overridden.*\) is gone", text)
    megatron.core.__version__, MoELayer.route = version, route


@ranks(2)
def test_experts_and_a_dispatcher_that_are_unknown() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    class OtherExperts(torch.nn.Module):
        num_local_experts = 4

    class OtherDispatcher(MoETokenDispatcher):
        pass

    chunks, _ = tiny_gpt.build(tiny_gpt.initialized())
    first, second = tiny_gpt.moe_layers(chunks)
    first.experts = OtherExperts()
    second.token_dispatcher = object.__new__(OtherDispatcher)
    text = refusal(chunks)
    for message in (
        "layer 1: experts are a OtherExperts; FSSDP knows SequentialMLP and TEGrouped",
        "layer 2: the token dispatcher is a OtherDispatcher; FSSDP knows MoEAllGather",
    ):
        assert message in text


@ranks(2)
def test_a_half_converted_model() -> None:
    one, _ = tiny_gpt.build(tiny_gpt.initialized())
    two, _ = tiny_gpt.build(tiny_gpt.Case())
    hook = tiny_gpt.fssdp_hook()
    hook(one)
    with pytest.raises(
        ValueError, match="some layers run FSSDP already and others do not: layer 1, layer 2 of 4"
    ):
        hook([*one, *two])
