"""Tables of Megatron's settings that FSSDP does not combine with, each with the way out.

* `MODEL`: fields of ``TransformerConfig``.
* `WITH_SLOTS`: fields that matter only with replicas.
* `JOB`: settings outside the model, of data parallelism and of fine-tuning.

`find` applies the tables to configurations or mappings of any kind. Needs no Megatron.
"""

from __future__ import annotations

from typing import Any

from megatron_hecate.megatron.cuda_graphs import (
    WITH_REPLICAS,
    captured_parts,
    captures_iteration,
    holds_preprocess,
)
from megatron_hecate.megatron.rules import GROUPED_ONLY, Rule, SettingSources, is_set


def _graphs_hold_experts(settings: SettingSources) -> bool:
    """Whether CUDA graphs may hold experts, but not the whole iteration with its fetches."""
    parts = captured_parts(settings)
    return not captures_iteration(settings) and (parts is None or not parts <= WITH_REPLICAS)


def _moves_homes(settings: SettingSources) -> bool:
    return (settings["moe_fssdp_rehome"] or 0) > 0


def _runs_primus_kernels(settings: SettingSources) -> bool:
    return settings["enable_primus_turbo"] is not False


def _is_flex(settings: SettingSources) -> bool:
    return settings["moe_token_dispatcher_type"] == "flex"


def _has_budget(settings: SettingSources) -> bool:
    is_hybrid = _is_flex(settings) and settings["moe_flex_dispatcher_backend"] == "hybridep"
    return is_hybrid and bool(settings["moe_expert_rank_capacity_factor"])


# Values that our code was written for and tested with. Another value, of a later Megatron, is
# refused by its name, because code for a known value could train wrongly with it.
DISPATCHERS = ("allgather", "alltoall", "flex")
BACKENDS = ("deepep", "hybridep", "ncclep")
_GRAPHS = (
    "replicas are fetched and returned between CUDA graphs of the parts attn, mamba, mlp, "
    "moe_router and moe_preprocess (cuda_graph_modules, before 0.18 cuda_graph_scope), or within "
    "one of the whole iteration (cuda_graph_impl=full_iteration); other graphs contain the experts"
)
_IN_GRAPH = "one CUDA graph holds the whole iteration, and a replay runs no Python"
FROZEN = "one CUDA graph would freeze peers and sizes of the messages of transport {}"
NO_GRAPH = (
    "set model.cuda_graph_impl=none or leave out --cuda-graph-impl, and name no full_iteration in "
    "cuda_graph_modules or cuda_graph_scope"
)
UNFROZEN = (
    "set model.moe_fssdp_transport=nvlink or --moe-fssdp-transport nvlink, each group in one "
    f"NVLink domain, or {NO_GRAPH}"
)
_PRIMUS = (
    "Primus replaces Megatron's experts, dispatchers or MoE layers by its own, which have no "
    "replicas"
)
WITH_SLOTS = (
    Rule(
        "cuda_graph_impl",
        f"{_IN_GRAPH}: only HybridEP with a budget (moe_expert_rank_capacity_factor) lets no host "
        "wait for token counts",
        instead="none",
        when=lambda settings: captures_iteration(settings) and not _has_budget(settings),
        way="set model.moe_token_dispatcher_type=flex, model.moe_flex_dispatcher_backend=hybridep, "
        "model.use_transformer_engine_op_fuser=true and model.moe_expert_rank_capacity_factor=F or "
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
        "--use-transformer-engine-op-fuser --moe-expert-rank-capacity-factor F (docs/bound.md), or "
        f"{NO_GRAPH}",
    ),
    Rule(
        "moe_fssdp_transport",
        FROZEN.format("p2p"),
        instead="nvlink",
        known=("auto", "nvlink"),
        when=captures_iteration,
        way=UNFROZEN,
    ),
    Rule(
        "cuda_graph_warmup_steps",
        f"{_IN_GRAPH}: replicas, and pages of a stash, must have memory before it is captured",
        instead=2,
        unsupported=lambda settings: (
            captures_iteration(settings)
            and settings["cuda_graph_warmup_steps"] in range(1 + bool(settings["moe_paged_stash"]))
        ),
        hint=" or more",
    ),
    *(
        Rule(name, f"{_IN_GRAPH}: {why}", instead=instead, when=captures_iteration)
        for name, instead, why in (
            ("moe_fssdp_late_replicas", 0, "the host chooses late replicas"),
            ("moe_fssdp_rehome", 0, "homes may not move"),
            ("moe_enable_routing_replay", False, "replayed routes are read by the host"),
        )
    ),
    Rule(
        "expert_model_parallel_size",
        "FSSDP spreads the load of an expert-parallel group",
        instead=2,
        unsupported=lambda settings: (settings["expert_model_parallel_size"] or 1) < 2,
        hint=" or more",
    ),
    Rule(
        "moe_expert_capacity_factor",
        "NCCL EP sends dropped tokens to arbitrary experts, and so to an empty slot",
        instead=None,
        unsupported=lambda settings: (
            _is_flex(settings)
            and settings["moe_flex_dispatcher_backend"] == "ncclep"
            and float(settings["moe_expert_capacity_factor"] or -1) > 0
        ),
    ),
    Rule(
        "moe_pad_expert_input_to_capacity",
        "replicas take no padding, so the host waits for token counts inside the part that a CUDA "
        "graph of moe_preprocess captures",
        when=lambda settings: not _is_flex(settings) and holds_preprocess(settings),
    ),
)
MODEL = (
    Rule(
        "moe_token_dispatcher_type",
        f"replicas were tested with the dispatchers {', '.join(DISPATCHERS)}",
        instead="alltoall",
        known=DISPATCHERS,
    ),
    Rule(
        "moe_flex_dispatcher_backend",
        "each backend reads probabilities and sizes its buffers in its own way; "
        f"known are {', '.join(BACKENDS)}",
        instead="hybridep",
        known=BACKENDS,
        when=_is_flex,
    ),
    Rule(
        "moe_router_score_function",
        "DeepEP and NCCL EP find a token's experts by positive probabilities, which the known "
        "functions return: softmax, sigmoid and sqrtsoftplus",
        instead="softmax",
        known=("softmax", "sigmoid", "sqrtsoftplus"),
    ),
    Rule(
        "moe_router_dtype",
        "kernels that reroute tokens read probabilities in fp32, fp64 and the model's own dtype",
        instead="fp32",
        known=("fp32", "fp64", "float32", "float64"),
    ),
    Rule(
        "fp8_recipe",
        "delayed scaling keeps a history per slot, whose replica changes; "
        "custom quantizers are unknown",
        instead="mxfp8",
        unsupported=lambda settings: (
            # without a name it is Megatron's default, "delayed"
            is_set(settings["fp8"])
            and getattr(settings["fp8_recipe"], "value", settings["fp8_recipe"])
            not in ("mxfp8", "tensorwise", "blockwise")
        ),
        way="set mixed_precision=bf16_with_mxfp8_mixed, bf16_with_fp8_current_scaling_mixed or "
        "bf16_with_fp8_subchannel_scaling_mixed, "
        "or --fp8-recipe mxfp8, tensorwise or blockwise",
    ),
    Rule(
        "fp4_recipe",
        "quantizers other than nvfp4's are unknown",
        instead="nvfp4",
        known=("nvfp4",),
        when=lambda settings: is_set(settings["fp4"]),
        way="set mixed_precision=bf16_with_nvfp4_mixed or --fp4-recipe nvfp4",
    ),
    Rule(
        "moe_grouped_gemm",
        "SequentialMLP has no replicas in fp8 or fp4, or with delayed weight gradients",
        instead=True,
        unsupported=lambda settings: (
            any(is_set(settings[name]) for name in GROUPED_ONLY)
            and settings["moe_grouped_gemm"] is False
        ),
        way="set model.moe_grouped_gemm=true or --moe-grouped-gemm",
    ),
    Rule(
        "use_kitchen",
        "experts built of Kitchen's linears have no replicas",
        flag="",
        hint=" or leave out --kitchen-config-file and --kitchen-recipe-number",
    ),
    Rule(
        "overlap_dispatch_backward_with_experts_wgrad",
        "Megatron reads gradients of experts before their computation, unless "
        "gradient_accumulation_fusion is on, and add_bias_linear and overlap_grad_reduce are off",
        when=lambda settings: (
            settings["gradient_accumulation_fusion"] is False
            or is_set(settings["add_bias_linear"])
            or is_set(settings["overlap_grad_reduce"])
        ),
    ),
    *(
        # new in 0.20
        Rule(name, f"{tokens} in bf16 only", instead="bf16", known=("bf16",))
        for name, tokens in (
            ("moe_dispatch_fwd_dtype", "tokens are dispatched to replicas"),
            ("moe_combine_bwd_dtype", "gradients of tokens are sent to replicas"),
        )
    ),
    *(
        Rule(name, _GRAPHS, instead=instead, when=_graphs_hold_experts)
        for name, instead in (
            ("cuda_graph_impl", "none"),
            ("enable_cuda_graph", False),
            ("external_cuda_graph", False),
        )
    ),
    *(
        Rule(name, "one tensor for all experts has no room for replicas")
        for name in ("moe_single_grouped_weight", "moe_single_grouped_bias")
    ),
    Rule(
        # New in 0.20. The op fuser sets it, and then runs the same operators over one weight per
        # expert as before.
        "moe_use_grouped_tensor",
        "quantized modules over grouped tensors were never tested with replicas, unlike "
        "TransformerEngine's operators",
        when=lambda settings: (
            not is_set(settings["use_transformer_engine_op_fuser"])
            and any(is_set(settings[name]) for name in ("fp8", "fp4", "quant_recipe"))
        ),
        hint=" or model.use_transformer_engine_op_fuser=true",
    ),
    Rule("moe_use_legacy_grouped_gemm", "the legacy GroupedMLP has no room for replicas"),
    *(
        # the second is the dev branch's name
        Rule(name, "its communication buffers have room for homes only")
        for name in ("moe_ncclep_zero_copy", "moe_ncclep_use_symm_mem")
    ),
    # of Megatron's dev branch and of open pull requests in August 2026
    Rule(
        "moe_megakernel_backend",
        "one kernel for dispatch, experts and combine computes no replicas",
        instead=None,
    ),
    Rule(
        "moe_use_offloading_experts",
        "experts in host memory have no weights on the GPU to fetch replicas from",
    ),
    Rule(
        "moe_shortcut_connection",
        "experts run beside the attention that hides the fetch of their replicas",
    ),
    Rule(
        "moe_router_topk_mode",
        "a number of experts that differs by token was never tested with replicas",
        instead="topk",
        known=("topk",),
    ),
    Rule("mxfp8_2d_quantization", "weights in square blocks were never tested with replicas"),
    *(
        Rule(name, "quantizers of a recipe with other attributes are unknown", instead=None)
        for name in ("fp8_recipe_attrs", "fp4_recipe_attrs")
    ),
    Rule(
        "mlp_chunks_for_training",
        "a layer that runs several times per microbatch cannot count microbatches",
        instead=1,
    ),
    Rule(
        "cpu_offloading",
        "offloading moves the weights that replicas are fetched from",
        flag="",
        hint=" and model.cpu_offloading_num_layers=0 or leave out --cpu-offloading-num-layers",
    ),
    *(
        Rule(
            f"{prefix}gtp_weight_remat_size",
            "expert weights are sharded already",
            instead=1,
            flag="",
            hint=f" and model.{prefix}tensor_parallel_num_weight_shards=null or leave out "
            f"--{flag}tensor-parallel-num-weight-shards",
        )
        for prefix, flag in (("", ""), ("expert_", "expert-"))
    ),
    Rule(
        "transformer_impl",
        "FSSDP supports training with modules of transformer_engine or local ones",
        instead="transformer_engine",
        known=("local", "transformer_engine"),
    ),
    Rule("restore_modelopt_state", "ModelOpt replaces the experts' linears by its own", flag=""),
)
JOB = (
    Rule(
        "moe_fssdp_late_replicas",
        "the host chooses late replicas inside the part that a CUDA graph of moe_preprocess "
        "captures",
        instead=0,
        way="set model.moe_fssdp_late_replicas=0 or --moe-fssdp-late-replicas 0",
        when=holds_preprocess,
    ),
    *(
        Rule(
            name,
            "optimizer state that TransformerEngine stores with one scale per shard cannot move "
            "with experts",
            instead="fp32",
            known=("fp32", "bf16", "float32", "bfloat16"),
            when=_moves_homes,
            way="set model.moe_fssdp_rehome=0, --moe-fssdp-rehome 0 "
            f"or --{name.replace('_', '-')} fp32",
        )
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    Rule(
        "ckpt_format",
        "each rank saves its own experts in this format, also after a move (moe_fssdp_rehome)",
        instead="torch_dist",
        prefix="checkpoint.",
        known=("torch_dist",),
        when=_moves_homes,
    ),
    Rule(
        "use_megatron_fsdp",
        "Megatron-FSDP owns the expert weights; use the distributed optimizer",
        prefix="ddp.",
        hint=" and dist.use_megatron_fsdp=false",
    ),
    Rule(
        "use_torch_fsdp2",
        "FSDP2 owns the expert weights; use the distributed optimizer",
        prefix="dist.",
    ),
    *(
        Rule(
            name,
            _PRIMUS,
            when=_runs_primus_kernels,
            way=f"set {name}=false or enable_primus_turbo=false",
        )
        for name in ("use_turbo_grouped_gemm", "use_turbo_deepep", "use_turbo_mega_moe")
    ),
    Rule(
        # stage 1 replaces the router only
        "turbo_sync_free_moe_stage",
        _PRIMUS,
        instead=1,
        when=_runs_primus_kernels,
        way="set turbo_sync_free_moe_stage=1 or enable_primus_turbo=false",
    ),
    Rule(
        "modelopt_enabled",
        "ModelOpt replaces the experts' linears by its own",
        way="use a script that trains without ModelOpt",
    ),
    Rule(
        "peft",
        "adapters wrap the linears of the experts",
        instead=None,
        way="use a recipe without adapters, or set its peft to None in Python, "
        "for which Bridge takes no override",
    ),
)
WITHOUT_SLOTS = (
    Rule(
        "cuda_graph_impl",
        f"{_IN_GRAPH}, which is prepared for plans with slots only",
        instead="none",
        when=captures_iteration,
        way="set model.moe_fssdp_slots=1 or --moe-fssdp-slots 1 or more, or leave --moe-fssdp off",
    ),
)
RULES = WITH_SLOTS + MODEL + JOB


def find(*sources: Any, slots: int) -> list[str]:
    """Return one line for each setting in ``sources`` that FSSDP does not combine with.

    Args:
        sources: objects with attributes, or mappings: a ``TransformerConfig``, arguments of
            ``megatron.training``, a Bridge configuration and its parts ``model``, ``ddp`` and
            ``dist``. ``None`` is skipped.
        slots: replicas that a rank can hold per layer.
    """
    settings = SettingSources(*sources)
    return [r.explain(settings[r.setting]) for r in rules_for(slots) if r.applies(settings)]


def rules_for(slots: int) -> tuple[Rule, ...]:
    """Return the rules for ``slots`` replicas per rank and layer."""
    return RULES if slots else WITHOUT_SLOTS + MODEL + JOB
