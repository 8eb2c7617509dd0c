"""Megatron's settings that FSSDP does not combine with, each with the way out.

`MODEL` are fields of ``TransformerConfig``; `WITH_SLOTS` those that matter only where replicas are asked for; `JOB` are
settings outside the model: of data parallelism and of fine-tuning. `find` reads them from whatever holds them and needs
no Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hecate.settings.cuda_graphs import WITH_REPLICAS, captured_parts, holds_preprocess
from megatron_hecate.settings.rules import Rule, Settings, is_set


def _more_than_one(setting: str) -> Callable[[Settings], bool]:
    return lambda settings: (settings[setting] or 1) > 1


def _graphs_hold_experts(setting: str) -> Callable[[Settings], bool]:
    """Whether ``setting`` switches graphs on that hold experts, or leave no place to fetch their replicas."""

    def unsupported(settings: Settings) -> bool:
        parts = captured_parts(settings)
        return is_set(settings[setting]) and (parts is None or not parts <= WITH_REPLICAS)

    return unsupported


def _moves_scaled(setting: str) -> Callable[[Settings], bool]:
    """Whether homes move, and ``setting``, a dtype or its name, is none that an optimizer keeps without scales."""
    scaled = _unknown(setting, ("fp32", "bf16", "float32", "bfloat16"))
    return lambda settings: (settings["moe_fssdp_rehome"] or 0) > 0 and scaled(settings)


def _recipe(value: Any, default: str = "delayed") -> str:
    """Name of a recipe, which some versions give as an enumerator; without one it is Megatron's ``default``."""
    return str(getattr(value, "value", value) or default)


def _unknown(setting: str, known: tuple[str, ...]) -> Callable[[Settings], bool]:
    """Whether ``setting`` has a value that is none of ``known``; one that is not set is Megatron's default."""

    def unsupported(settings: Settings) -> bool:
        value = settings[setting]
        name = str(getattr(value, "value", value)).removeprefix("torch.")
        return is_set(value) and name not in known

    return unsupported


def _unknown_backend(settings: Settings) -> bool:
    of_flex = settings["moe_token_dispatcher_type"] == "flex"
    return of_flex and _unknown("moe_flex_dispatcher_backend", BACKENDS)(settings)


# Values that our code was written for and tested with. Another one, of a later Megatron, is refused by its name: taken
# for one of these it could train wrongly.
DISPATCHERS = ("allgather", "alltoall", "flex")
BACKENDS = ("deepep", "hybridep", "ncclep")
# settings that SequentialMLP, whose experts are modules of their own, does not combine with
GROUPED_ONLY = (
    "fp8",
    "fp4",
    "quant_recipe",
    "delay_wgrad_compute",
    "overlap_dispatch_backward_with_experts_wgrad",
)
_GRAPHS = (
    "replicas come and go between CUDA graphs of parts, which are attn, mamba, mlp, moe_router and moe_preprocess "
    "(cuda_graph_modules, before 0.18 cuda_graph_scope); others hold the experts as well"
)
_FP8_RECIPES = ("mxfp8", "tensorwise", "blockwise")
WITH_SLOTS = (
    Rule(
        "expert_model_parallel_size",
        "FSSDP spreads the load of an expert-parallel group",
        instead=2,
        unsupported=lambda settings: (settings["expert_model_parallel_size"] or 1) < 2,
        hint=" or more",
    ),
    Rule(
        "moe_expert_capacity_factor",
        "NCCL EP sends dropped tokens to any expert, and so to an empty slot",
        instead=None,
        unsupported=lambda settings: (
            settings["moe_token_dispatcher_type"] == "flex"
            and settings["moe_flex_dispatcher_backend"] == "ncclep"
            and float(settings["moe_expert_capacity_factor"] or -1) > 0
        ),
    ),
    Rule(
        "moe_pad_expert_input_to_capacity",
        "replicas take no padding, so the host waits for their numbers of tokens in the middle of what a CUDA graph of "
        "moe_preprocess holds",
        unsupported=lambda settings: (
            is_set(settings["moe_pad_expert_input_to_capacity"])
            and settings["moe_token_dispatcher_type"] != "flex"
            and holds_preprocess(settings)
        ),
    ),
)
MODEL = (
    Rule(
        "moe_token_dispatcher_type",
        f"replicas were tested with the dispatchers {', '.join(DISPATCHERS)}",
        instead="alltoall",
        unsupported=_unknown("moe_token_dispatcher_type", DISPATCHERS),
    ),
    Rule(
        "moe_flex_dispatcher_backend",
        f"each backend reads probabilities and sizes its buffers in its own way; known are {', '.join(BACKENDS)}",
        instead="hybridep",
        unsupported=_unknown_backend,
    ),
    Rule(
        "moe_router_score_function",
        "DeepEP and NCCL EP find a token's experts by probabilities above zero, as the known functions give them: "
        "softmax, sigmoid and sqrtsoftplus",
        instead="softmax",
        unsupported=_unknown("moe_router_score_function", ("softmax", "sigmoid", "sqrtsoftplus")),
    ),
    Rule(
        "moe_router_dtype",
        "kernels that reroute tokens read probabilities in fp32, fp64 and the model's own dtype",
        instead="fp32",
        unsupported=_unknown("moe_router_dtype", ("fp32", "fp64", "float32", "float64")),
    ),
    Rule(
        "fp8_recipe",
        "delayed scaling keeps a history for each expert's place, where replicas change; custom quantizers are unknown",
        instead="mxfp8",
        unsupported=lambda settings: (
            is_set(settings["fp8"]) and _recipe(settings["fp8_recipe"]) not in _FP8_RECIPES
        ),
        way="set mixed_precision=bf16_with_mxfp8_mixed, bf16_with_fp8_current_scaling_mixed or "
        "bf16_with_fp8_subchannel_scaling_mixed, or --fp8-recipe mxfp8, tensorwise or blockwise",
    ),
    Rule(
        "fp4_recipe",
        "quantizers other than nvfp4's are unknown",
        instead="nvfp4",
        unsupported=lambda settings: (
            is_set(settings["fp4"]) and _recipe(settings["fp4_recipe"], "nvfp4") != "nvfp4"
        ),
        way="set mixed_precision=bf16_with_nvfp4_mixed or --fp4-recipe nvfp4",
    ),
    Rule(
        "moe_grouped_gemm",
        "SequentialMLP has no replicas in fp8 or fp4, or with delayed weight gradients",
        instead=True,
        unsupported=lambda settings: (
            settings["moe_grouped_gemm"] is False
            and any(is_set(settings[name]) for name in GROUPED_ONLY)
        ),
        way="set model.moe_grouped_gemm=true or --moe-grouped-gemm",
    ),
    Rule(
        "use_kitchen",
        "experts of Kitchen's own linears have no replicas",
        flag="",
        hint=" or leave out --kitchen-config-file and --kitchen-recipe-number",
    ),
    Rule(
        "overlap_dispatch_backward_with_experts_wgrad",
        "Megatron takes gradients of experts before they are computed, unless gradient_accumulation_fusion is on, "
        "add_bias_linear and overlap_grad_reduce off",
        unsupported=lambda settings: (
            is_set(settings["overlap_dispatch_backward_with_experts_wgrad"])
            and (
                settings["gradient_accumulation_fusion"] is False
                or is_set(settings["add_bias_linear"])
                or is_set(settings["overlap_grad_reduce"])
            )
        ),
    ),
    Rule(
        "moe_dispatch_fwd_dtype",  # 0.20
        "tokens are dispatched to replicas in bf16 only",
        instead="bf16",
        unsupported=lambda settings: settings["moe_dispatch_fwd_dtype"] not in (None, "bf16"),
    ),
    Rule(
        "moe_combine_bwd_dtype",  # 0.20
        "gradients of tokens come to replicas in bf16 only",
        instead="bf16",
        unsupported=lambda settings: settings["moe_combine_bwd_dtype"] not in (None, "bf16"),
    ),
    *(
        Rule(name, _GRAPHS, instead=instead, unsupported=_graphs_hold_experts(name))
        for name, instead in (
            ("cuda_graph_impl", "none"),
            ("enable_cuda_graph", False),
            ("external_cuda_graph", False),
        )
    ),
    Rule(
        "moe_paged_stash",
        "what fused operators stash in pages was never run with replicas",
        unsupported=lambda settings: (
            is_set(settings["moe_paged_stash"])
            and is_set(settings["use_transformer_engine_op_fuser"])
        ),
    ),
    Rule("moe_single_grouped_weight", "one tensor for all experts has no room for replicas"),
    Rule("moe_single_grouped_bias", "one tensor for all experts has no room for replicas"),
    Rule(  # 0.20, whose op fuser sets it: the operators are then the same as before, over one weight per expert
        "moe_use_grouped_tensor",
        "TransformerEngine's modules over grouped tensors were never run with replicas; its operators were",
        unsupported=lambda settings: (
            is_set(settings["moe_use_grouped_tensor"])
            and not is_set(settings["use_transformer_engine_op_fuser"])
        ),
        hint=" or model.use_transformer_engine_op_fuser=true",
    ),
    Rule("moe_use_legacy_grouped_gemm", "the legacy GroupedMLP has no room for replicas"),
    Rule("moe_ncclep_zero_copy", "its communication buffers belong to homes only"),
    Rule(
        "mlp_chunks_for_training",
        "a layer that runs several times per microbatch cannot count them",
        instead=1,
        unsupported=_more_than_one("mlp_chunks_for_training"),
    ),
    Rule(
        "cpu_offloading",
        "weights that replicas are fetched from move",
        flag="",
        hint=" and model.cpu_offloading_num_layers=0 or leave out --cpu-offloading-num-layers",
    ),
    Rule(
        "gtp_weight_remat_size",
        "expert weights are sharded already",
        instead=1,
        unsupported=_more_than_one("gtp_weight_remat_size"),
        flag="",
        hint=" and model.tensor_parallel_num_weight_shards=null or leave out --tensor-parallel-num-weight-shards",
    ),
    Rule(
        "expert_gtp_weight_remat_size",
        "expert weights are sharded already",
        instead=1,
        unsupported=_more_than_one("expert_gtp_weight_remat_size"),
        flag="",
        hint=" and model.expert_tensor_parallel_num_weight_shards=null or leave out "
        "--expert-tensor-parallel-num-weight-shards",
    ),
    Rule(
        "transformer_impl",
        "FSSDP is for training, with modules of transformer_engine or local ones",
        instead="transformer_engine",
        unsupported=_unknown("transformer_impl", ("local", "transformer_engine")),
    ),
    Rule("restore_modelopt_state", "ModelOpt replaces the experts' linears by its own", flag=""),
)
JOB = (
    Rule(
        "moe_fssdp_late_replicas",
        "late replicas are chosen by the host, in the middle of what a CUDA graph of moe_preprocess holds",
        instead=0,
        way="set model.moe_fssdp_late_replicas=0 or --moe-fssdp-late-replicas 0",
        unsupported=lambda settings: (
            (settings["moe_fssdp_late_replicas"] or 0) > 0 and holds_preprocess(settings)
        ),
    ),
    *(
        Rule(
            name,
            "what TransformerEngine keeps with one scale for a whole shard cannot move with experts",
            instead="fp32",
            unsupported=_moves_scaled(name),
            way=f"set model.moe_fssdp_rehome=0, --moe-fssdp-rehome 0 or --{name.replace('_', '-')} fp32",
        )
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    Rule(
        "ckpt_format",
        "ranks write these checkpoints one by one, with homes where they have moved (moe_fssdp_rehome)",
        instead="torch_dist",
        part="checkpoint.",
        unsupported=lambda settings: (
            (settings["moe_fssdp_rehome"] or 0) > 0
            and settings["ckpt_format"] not in (None, "torch_dist")
        ),
    ),
    Rule(
        "use_megatron_fsdp",
        "Megatron-FSDP owns the expert weights; use the distributed optimizer",
        part="ddp.",
        hint=" and dist.use_megatron_fsdp=false",
    ),
    Rule(
        "use_torch_fsdp2",
        "FSDP2 owns the expert weights; use the distributed optimizer",
        part="dist.",
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
        way="use a recipe without adapters, or set its peft to None in Python, for which Bridge takes no override",
    ),
)
RULES = WITH_SLOTS + MODEL + JOB


def find(*sources: Any, slots: int) -> list[str]:
    """Every setting in any of the sources that FSSDP does not combine with, a line each.

    Args:
        sources: objects with attributes, or mappings: a ``TransformerConfig``, arguments of ``megatron.training``, a
            Bridge configuration and its parts ``model``, ``ddp`` and ``dist``. ``None`` is skipped.
        slots: replicas that a rank can hold per layer.
    """
    settings = Settings(*sources)
    rules = RULES if slots else MODEL + JOB
    return [rule.explain(settings[rule.setting]) for rule in rules if rule.applies(settings)]
