"""Every setting of Megatron that may touch experts is known to work, refused, or of no concern: none slips through.

Oracle: the fields of ``TransformerConfig`` of the installed Megatron, and lists of the oldest, the newest and main.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from megatron_hecate.adapter import unsupported

pytestmark = pytest.mark.fast

LISTS = json.loads((Path(__file__).resolve().parents[1] / "data" / "transformer_config_fields.json").read_text())
MATTERS = re.compile(
    r"moe_|recipe|fp8|fp4|graph|quant|offload|wgrad|mtp|gtp|kitchen|batch_invariant|mlp_chunks|op_fuser"
)

# Shown by tests, which docs/compatibility.md names, with replicas in use.
WORKS = """
    num_moe_experts moe_ffn_hidden_size moe_latent_size moe_mlp_glu_interleave_size
    moe_layer_freq moe_layer_recompute
    moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep overlap_moe_expert_parallel_comm
    moe_token_drop_policy moe_apply_probs_on_input
    moe_shared_expert_intermediate_size moe_shared_expert_overlap
    moe_router_dtype moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_router_pre_softmax moe_router_score_function moe_router_num_groups moe_router_group_topk
    moe_router_enable_expert_bias moe_router_bias_update_rate
    mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer
    delay_wgrad_compute use_transformer_engine_op_fuser moe_expert_rank_capacity_factor moe_ncclep_static_shape
    fine_grained_activation_offloading offload_modules
    fp8 fp8_param fp4 fp4_param quant_recipe moe_router_padding_for_quantization moe_router_padding_for_fp8
"""
# Of what only follows a setting that is refused, or has no effect without it.
OF_REFUSED = {
    "cuda_graph_impl": """
        cuda_graph_modules cuda_graph_scope cuda_graph_retain_backward_graph cuda_graph_use_single_mempool
        cuda_graph_warmup_steps delay_offload_until_cuda_graph
    """,
    "cpu_offloading": """
        cpu_offloading_activations cpu_offloading_weights cpu_offloading_num_layers cpu_offloading_double_buffering
        cpu_offloading_retain_pinned_cpu_buffers
    """,
    "fp8_recipe": "fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_quantizer_factory",
    "fp4_recipe": "fp4_quantizer_factory",
    "moe_paged_stash": """
        moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
    """,
    "gtp_weight_remat_size": "gtp_remat_opt_in_modules",
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
        moe_enable_routing_replay moe_input_jitter_eps moe_router_force_biased moe_router_force_load_balancing
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
    "losses and logs": "moe_grad_scale_func mtp_grad_scale_func moe_per_layer_logging",
    "each token by itself, in the same module with the same settings": """
        activation_func_fp8_input_store moe_permute_fusion batch_invariant_mode
        batch_invariant_backend
    """,
    "kernels of a dispatcher, which is built over physical experts as it is": """
        moe_permute_fusion_into_hybridep moe_deepep_num_sms moe_flex_dispatcher_num_sms moe_hybridep_num_sms
        moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_pad_uneven_dispatch_inputs
    """,
    "Megatron refuses it, or takes it as another field": "moe_token_dropping moe_extended_tp",
}


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

    fields = [field.name for field in dataclasses.fields(TransformerConfig) if not field.name.startswith("_")]
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
    outside = {rule.setting for rule in unsupported.JOB} | {"restore_modelopt_state"}
    for name, members in _classes().items():
        assert members - outside <= known, f"{name}: {members - outside - known}"


def test_settings_that_follow_a_refused_one_come_with_it() -> None:
    assert OF_REFUSED.keys() <= {rule.setting for rule in unsupported.RULES}


def test_the_lists_are_those_of_megatron() -> None:
    version, fields = _installed()
    assert {*fields} == {*LISTS.get(version, fields)}
