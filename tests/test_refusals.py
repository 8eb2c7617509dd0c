"""What FSSDP says when it cannot be switched on, and that the model is then as it was. Oracle: literal messages."""

from __future__ import annotations

import re
import time

import pytest
from ranks import ranks
from test_hook import snapshot


@ranks(2)
def test_ep_of_one_is_refused() -> None:
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(ep=1)
    tiny_gpt.initialize(case)
    chunks, _ = tiny_gpt.build(case)
    before = snapshot(chunks)
    with pytest.raises(ValueError, match=r"expert_model_parallel_size=1: .* set --expert-model-parallel-size to 2"):
        fssdp(HecateConfig(timeout=30))(chunks)
    assert snapshot(chunks) == before


@ranks(2)
def test_too_many_slots_are_refused() -> None:
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    chunks, _ = tiny_gpt.build(case)
    with pytest.raises(ValueError, match=r"layer 1: slots=5 is out of range: .* 4 of 8 experts can host 0 to 4 guests"):
        fssdp(HecateConfig(slots=5, timeout=30))(chunks)


@ranks(2)
def test_every_refused_setting_is_listed_at_once() -> None:
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    chunks, config = tiny_gpt.build(case)
    planted = dict(
        fp8="hybrid",
        fp4="e2m1",
        moe_pad_expert_input_to_capacity=True,
        moe_expert_rank_capacity_factor=1.5,
        moe_paged_stash=True,
        cuda_graph_impl="local",
        enable_cuda_graph=True,
        external_cuda_graph=True,
        delay_wgrad_compute=True,
        overlap_dispatch_backward_with_experts_wgrad=True,
        use_transformer_engine_op_fuser=True,
        moe_single_grouped_weight=True,
        moe_single_grouped_bias=True,
        moe_use_legacy_grouped_gemm=True,
        moe_ncclep_zero_copy=True,
        moe_router_padding_for_quantization=True,
        moe_router_padding_for_fp8=True,
        mtp_use_repeated_layer=True,
        cpu_offloading=True,
        fine_grained_activation_offloading=True,
        gtp_weight_remat_size=2,
        expert_gtp_weight_remat_size=2,
        transformer_impl="inference_optimized",
    )
    for name, value in planted.items():
        setattr(config, name, value)
    with pytest.raises(ValueError) as error:
        fssdp(HecateConfig(timeout=30))(chunks)
    for name, value in planted.items():
        assert f"  - --moe-fssdp with {name}={value!r}: " in str(error.value)
    assert str(error.value).count("\n") == len(planted)
    from megatron_hecate import seams

    assert {rule.setting for rule in seams.REFUSED} == {*planted}, "untested refusal"


@ranks(2)
def test_ranks_with_other_settings_are_named() -> None:
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    chunks, _ = tiny_gpt.build(case)
    with pytest.raises(ValueError, match="rank 1 has slots=3, rank 0 has slots=2"):
        fssdp(HecateConfig(slots=2 + dist.get_rank(), timeout=30))(chunks)


@ranks(2)
def test_a_rank_without_the_flag_is_named_in_time() -> None:
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    chunks, _ = tiny_gpt.build(case)
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"rank 0 waited 2 s for ranks \[1\] to switch FSSDP on; is --moe-fssdp"):
            fssdp(HecateConfig(timeout=2))(chunks)
        assert time.monotonic() - start < 10
    else:
        time.sleep(4)  # this rank never runs the hook


@ranks(2)
def test_a_problem_of_one_rank_stops_all() -> None:
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    chunks, config = tiny_gpt.build(case)
    before = snapshot(chunks)
    if dist.get_rank() == 1:
        config.fp8 = "hybrid"
    with pytest.raises(ValueError, match="with fp8='hybrid'"):
        fssdp(HecateConfig(timeout=30))(chunks)
    assert snapshot(chunks) == before


@ranks(2)
def test_another_megatron_is_refused_with_a_list() -> None:
    import megatron.core
    import tiny_gpt
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_hecate import HecateConfig, fssdp, seams

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    chunks, _ = tiny_gpt.build(case)
    version, route = megatron.core.__version__, MoELayer.route
    assert seams.changed_seams() == []
    megatron.core.__version__ = "0.15.3"
    MoELayer.route = lambda self, x: None
    del MoELayer.preprocess
    with pytest.raises(ValueError) as error:
        fssdp(HecateConfig(timeout=30))(chunks)
    text = str(error.value)
    assert "megatron-core 0.15.3 is outside 0.16.1 to 0.20" in text
    assert re.search(r"MoELayer.route \(overridden.*\) no longer takes hidden_states", text)
    assert re.search(r"MoELayer.preprocess \(overridden.*\) is gone", text)
    megatron.core.__version__, MoELayer.route = version, route
    for number, fits in (("0.16.1", True), ("0.20.0rc0", True), ("0.20.3", True), ("0.21.0", False), ("0.16.0", False)):
        megatron.core.__version__ = number
        assert any("outside" in line for line in seams.changed_seams()) != fits, number


@ranks(2)
def test_unknown_expert_module_is_refused() -> None:
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    chunks, _ = tiny_gpt.build(case)

    class OtherExperts(torch.nn.Module):
        num_local_experts = 4

    tiny_gpt.moe_layers(chunks)[0].experts = OtherExperts()
    with pytest.raises(
        ValueError, match="layer 1: experts are a OtherExperts; FSSDP knows SequentialMLP and TEGrouped"
    ):
        fssdp(HecateConfig(timeout=30))(chunks)


@ranks(2)
def test_megatron_refuses_experts_that_do_not_divide() -> None:
    import tiny_gpt

    case = tiny_gpt.Case(experts=7)
    tiny_gpt.initialize(case)
    with pytest.raises((AssertionError, ValueError)):  # Megatron's own rule, before our hook could run
        tiny_gpt.build(case)


@ranks(2)
def test_any_exception_of_one_rank_is_heard_by_all() -> None:
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp, state

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    chunks, _ = tiny_gpt.build(case)
    if dist.get_rank() == 1:

        def fails(*args: object) -> None:
            raise AttributeError("planted")

        state.physical_dispatcher = fails
    with pytest.raises(ValueError, match="layer 1: AttributeError: planted"):
        fssdp(HecateConfig(timeout=30))(chunks)


@ranks(2)
def test_a_half_converted_model_is_refused() -> None:
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    one, _ = tiny_gpt.build(case)
    two, _ = tiny_gpt.build(case)
    hook = fssdp(HecateConfig(timeout=30))
    hook(one)
    with pytest.raises(ValueError, match="some layers run FSSDP already and others do not: layer 1, layer 2 of 4"):
        hook([*one, *two])


@ranks(2)
def test_experts_of_mixed_dtypes_are_refused() -> None:
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp, seams

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)

    def half_double(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            for expert in layer.experts.local_experts:
                expert.linear_fc1.weight.data = expert.linear_fc1.weight.data.bfloat16()
        return fssdp(HecateConfig(timeout=30))(chunks)

    chunks, _ = tiny_gpt.build(case, half_double)
    state = tiny_gpt.moe_layers(chunks)[0].fssdp
    state._plan = lambda: state.homes_only.with_guests([(0, 1)])
    with pytest.raises(
        ValueError, match=r"layer 1: expert parameters have dtypes \['torch.bfloat16', 'torch.float32'\]"
    ):
        state.materialize(seams.Forward.MICROBATCH)
    assert torch.is_grad_enabled()
