"""Every setting of Megatron that may touch experts is known to work, refused, or of no concern: none slips through.

Oracle: the fields of ``TransformerConfig`` of the installed Megatron, and lists of the oldest, the newest, main, dev
and open pull requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from megatron_hecate import HecateConfig
from megatron_hecate.switch_on import unsupported
from megatron_hecate.switch_on.launcher import flags_among

pytestmark = pytest.mark.fast

DATA = Path(__file__).resolve().parents[1] / "data"
LISTS = json.loads((DATA / "transformer_config_fields.json").read_text())
CHOICES = json.loads((DATA / "transformer_config_choices.json").read_text())
MATTERS = re.compile(
    r"moe_|recipe|fp8|fp4|graph|quant|offload|wgrad|mtp|gtp|kitchen|batch_invariant|mlp_chunks|op_fuser"
)

# Shown by tests, which docs/compatibility.md names, with replicas in use.
WORKS = """
    num_moe_experts moe_ffn_hidden_size moe_latent_size moe_mlp_glu_interleave_size
    moe_layer_freq moe_layer_recompute
    moe_enable_deepep overlap_moe_expert_parallel_comm
    moe_token_drop_policy moe_apply_probs_on_input
    moe_shared_expert_intermediate_size moe_shared_expert_overlap
    moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
    moe_router_enable_expert_bias moe_router_bias_update_rate
    moe_n_hash_layers
    mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer
    delay_wgrad_compute use_transformer_engine_op_fuser moe_expert_rank_capacity_factor moe_ncclep_static_shape
    moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_buffer_size_factor_cpu
    fine_grained_activation_offloading offload_modules
    fp8 fp8_param fp4 fp4_param quant_recipe moe_router_padding_for_quantization moe_router_padding_for_fp8
"""
# Of what only follows a setting that is refused, or has no effect without it.
OF_REFUSED = {
    "cuda_graph_impl": """
        cuda_graph_modules cuda_graph_scope cuda_graph_retain_backward_graph cuda_graph_use_single_mempool
        cuda_graph_dynamic_microbatches delay_offload_until_cuda_graph
    """,
    "cpu_offloading": """
        cpu_offloading_activations cpu_offloading_weights cpu_offloading_num_layers cpu_offloading_double_buffering
        cpu_offloading_retain_pinned_cpu_buffers
    """,
    "fp8_recipe": "fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_quantizer_factory",
    "fp4_recipe": "fp4_quantizer_factory",
    "gtp_weight_remat_size": "gtp_remat_opt_in_modules",
    "moe_megakernel_backend": "moe_megakernel_backend_config",
    "moe_use_offloading_experts": """
        moe_offloading_num_chunks moe_offloading_num_stages moe_offloading_chunk_size
        moe_offloading_experts_te_style_init moe_offloading_experts_skip_post_backward_hook
        moe_offloading_experts_debug_mode
    """,
    "moe_shortcut_connection": "moe_shortcut_parallel",
    "moe_router_topk_mode": "moe_router_seq_topk_upper_bound",
}
NO_CONCERN = {
    "inference only": """
        inference_cuda_graph_scope inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        moe_pad_experts_for_cuda_graph_inference mlp_chunks_for_prefill
    """,
    "attention, embedding or tensor parallelism": """
        fp8_dot_product_attention fp8_multi_head_attention fp8_output_proj use_kitchen_attention
        kitchen_attention_backend defer_embedding_wgrad_compute wgrad_deferral_limit tp_comm_bulk_wgrad
    """,
    "shared experts, which stay stock": "moe_shared_expert_gate moe_shared_expert_glu_interleave_size",
    "the router, which acts on logical experts before tokens are rerouted": """
        moe_input_jitter_eps moe_router_force_biased moe_router_force_load_balancing
        moe_router_fusion moe_router_quantile_balancing_ema moe_router_topk_limited_devices
        moe_router_topk_scaling_factor
    """,
    "the heads of multi-token prediction, around its layers": """
        mtp_detach_heads mtp_hsm mtp_hybrid_override_pattern mtp_standalone
    """,
    "how much is offloaded, and when": """
        activation_offload_fraction delta_offload_bytes_across_pp_ranks min_offloaded_tensor_size
        fine_grained_offloading_max_inflight_offloads
    """,
    "losses and logs": """
        moe_grad_scale_func mtp_grad_scale_func moe_per_layer_logging log_moe_overload_factor
    """,
    "each token by itself, in the same module with the same settings": """
        activation_func_fp8_input_store moe_permute_fusion batch_invariant_mode
        batch_invariant_backend
    """,
    "kernels of a dispatcher, which is built over physical experts as it is": """
        moe_permute_fusion_into_hybridep moe_deepep_num_sms moe_flex_dispatcher_num_sms moe_hybridep_num_sms
        moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_pad_uneven_dispatch_inputs moe_hybridep_pad_variable_tokens
    """,
    "Megatron refuses it, or takes it as another field": "moe_token_dropping moe_extended_tp",
}

# Values of settings with names for values: those that work with replicas, and those that are refused by their name.
VALUES = {  # setting: works, refused, what else is set
    "moe_token_dispatcher_type": ("allgather alltoall flex", "moonep", {}),
    "moe_flex_dispatcher_backend": (
        "deepep hybridep ncclep",
        "deepepv2 moonep",
        dict(moe_token_dispatcher_type="flex"),
    ),
    "moe_router_score_function": ("softmax sigmoid sqrtsoftplus", "", {}),
    "moe_router_dtype": ("fp32 fp64", "", {}),
    "moe_router_topk_mode": ("topk", "seq_topk", {}),
    "moe_megakernel_backend": ("", "mok fk", {}),
    "moe_dispatch_fwd_dtype": ("bf16", "mxfp8", {}),
    "moe_combine_bwd_dtype": ("bf16", "mxfp8", {}),
    "fp8_recipe": ("tensorwise mxfp8 blockwise", "delayed custom", dict(fp8="e4m3")),
    "fp4_recipe": ("nvfp4", "custom", dict(fp4="e2m1")),
    "cuda_graph_impl": (
        "none local transformer_engine",
        "full_iteration",
        dict(cuda_graph_modules=["attn"]),
    ),
    "transformer_impl": ("local transformer_engine", "inference_optimized", {}),
}
# The router drops tokens before they are rerouted; formats are TransformerEngine's business; the rest follows settings
# in `OF_REFUSED` and `NO_CONCERN`.
READ_BY_MEGATRON_ONLY = {
    "moe_token_drop_policy", "fp8", "fp4", "fp8_amax_compute_algo", "batch_invariant_backend",
    "inference_moe_token_dispatcher_type", "kitchen_attention_backend",
}  # fmt: skip


def _classes() -> dict[str, set[str]]:
    refused = {rule.setting for rule in unsupported.RULES}
    return {
        "works": {*WORKS.split()},
        "refused": refused | {name for names in OF_REFUSED.values() for name in names.split()},
        "no concern": {name for names in NO_CONCERN.values() for name in names.split()},
    }


def _installed() -> tuple[str, list[str]]:
    import megatron.core
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = [
        field.name
        for field in dataclasses.fields(TransformerConfig)
        if not field.name.startswith("_")
    ]
    return megatron.core.__version__.partition("+")[0], fields


@pytest.mark.parametrize("version", ["installed", *LISTS])
def test_each_field_is_in_one_class(version: str) -> None:
    fields = LISTS[version] if version in LISTS else _installed()[1]
    classes = _classes()
    for field in filter(MATTERS.search, fields):
        found = [name for name, members in classes.items() if field in members]
        assert len(found) == 1, f"{field} of {version} is {found or 'not classified'}"


def test_each_name_is_a_field_of_some_version() -> None:
    known = {*_installed()[1]}.union(*LISTS.values())
    outside = {rule.setting for rule in unsupported.JOB} | {
        "restore_modelopt_state",
        "moe_fssdp_rehome",
        "moe_fssdp_transport",
    }
    for name, members in _classes().items():
        assert members - outside <= known, f"{name}: {members - outside - known}"


def test_settings_that_follow_a_refused_one_come_with_it() -> None:
    assert OF_REFUSED.keys() <= {rule.setting for rule in unsupported.RULES}


def test_the_lists_are_those_of_megatron() -> None:
    version, fields = _installed()
    assert {*fields} == {*LISTS.get(version, fields)}


@pytest.mark.parametrize("version", CHOICES)
def test_each_value_with_a_name_works_or_is_refused(version: str) -> None:
    for setting, choices in CHOICES[version].items():
        if setting not in READ_BY_MEGATRON_ONLY:
            works, refused, _ = VALUES[setting]
            assert {*choices} <= {*works.split(), *refused.split()}, setting


@pytest.mark.parametrize("setting", VALUES)
def test_a_value_of_a_later_megatron_is_refused_by_its_name(setting: str) -> None:
    works, refused, others = VALUES[setting]
    job = dict(expert_model_parallel_size=2, **others)
    for value in works.split():
        assert not unsupported.find(job, {setting: value}, slots=2)
    for value in [*refused.split(), "of_later"]:
        for slots in (0, 2):
            (problem,) = unsupported.find(job, {setting: value}, slots=slots)
            assert problem.startswith(f"--moe-fssdp with {setting}={value!r}: ")


def test_optimizer_states_of_an_unknown_dtype_do_not_move() -> None:
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        for dtype in ("fp32", "bf16", torch.float32, torch.bfloat16):
            assert not unsupported.find({name: dtype, "moe_fssdp_rehome": 4}, slots=0)
        for dtype in ("fp16", "fp8", "mxfp8", torch.float16, torch.uint8, torch.float8_e4m3fn):
            assert not unsupported.find({name: dtype}, slots=0)
            (problem,) = unsupported.find({name: dtype, "moe_fssdp_rehome": 4}, slots=0)
            assert f"with {name}=" in problem


def test_a_scope_left_over_where_graphs_are_off_holds_no_iteration() -> None:
    job = dict(expert_model_parallel_size=2, moe_fssdp_late_replicas=2)
    job |= dict(cuda_graph_scope="full_iteration")
    assert not unsupported.find(job, dict(cuda_graph_impl="none"), slots=2)
    assert len(unsupported.find(job, dict(cuda_graph_impl="local"), slots=2)) == 2


@pytest.mark.parametrize("rule", unsupported.RULES, ids=lambda rule: rule.setting)
def test_a_way_out_has_values_that_are_taken(rule: unsupported.Rule) -> None:
    """Oracle: the rule itself, and our own settings and flags."""
    named = dict(re.findall(r"\w+\.(\w+)=([^\s,]+)", rule.way_out))
    is_json = re.compile("true|false|null|[0-9]+")
    named = {
        name: json.loads(text) if is_json.fullmatch(text) else text for name, text in named.items()
    }
    assert not rule.applies(unsupported.SettingSources(named))
    ours = {name: value for name, value in named.items() if name.startswith("moe_fssdp_")}
    assert HecateConfig.from_arguments(argparse.Namespace(moe_fssdp=True, **ours)) is not None
    for flag, value in re.findall(r"(--moe-fssdp-[\w-]+) (\w+)", rule.way_out):
        assert flags_among([flag, value])


def test_messages_and_warm_up_of_a_graph_of_iterations() -> None:
    """They are refused without the job, too. A stash has its pages from the second step on."""
    job = dict(expert_model_parallel_size=2, moe_expert_rank_capacity_factor=1.5)
    job |= dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    graph = dict(cuda_graph_impl="full_iteration")
    cases = [dict(moe_fssdp_transport=name) for name in ("auto", "nvlink", "p2p")]
    for has_stash in (False, True):
        stash = dict(moe_paged_stash=has_stash)
        cases += [dict(stash, cuda_graph_warmup_steps=steps) for steps in (0, 1, 2)]
    assert not any(unsupported.find(job, case, slots=2) for case in cases)
    refused = [len(unsupported.find(job, case, graph, slots=2)) for case in cases]
    assert refused == [0, 0, 1, 1, 0, 0, 1, 1, 0]
