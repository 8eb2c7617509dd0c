"""Megatron's settings that FSSDP does not combine with, each with the way out.

`MODEL` are fields of ``TransformerConfig``; `WITH_SLOTS` those that matter only where replicas are asked for; `JOB` are
settings outside the model: of data parallelism and of fine-tuning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """A Megatron setting FSSDP does not combine with.

    Args:
        setting: field of ``TransformerConfig``, or argument of ``megatron.training``.
        unsupported: whether this value is; a version without the field has ``None``.
        instead: why, and the way out.
    """

    setting: str
    unsupported: Callable[[Any], bool]
    instead: str


def _more_than_one(value: Any) -> bool:
    return (value or 1) > 1


def _set(value: Any) -> bool:
    return bool(value) and value != "none"


WITH_SLOTS = (
    Rule(
        "expert_model_parallel_size",
        lambda size: (size or 1) < 2,
        "FSSDP spreads the load of an expert-parallel group; set --expert-model-parallel-size to 2 or more",
    ),
)
MODEL = (
    Rule("fp8", _set, "replicas of quantized weights are not built; train the experts in bf16"),
    Rule("fp4", _set, "replicas of quantized weights are not built; train the experts in bf16"),
    Rule("cuda_graph_impl", _set, "replicas change every iteration and cannot be captured; set it to none"),
    Rule("enable_cuda_graph", _set, "replicas change every iteration and cannot be captured"),
    Rule("external_cuda_graph", _set, "replicas change every iteration and cannot be captured"),
    Rule("delay_wgrad_compute", _set, "gradients of replicas must exist when their layer's backward ends"),
    Rule(
        "overlap_dispatch_backward_with_experts_wgrad",
        _set,
        "gradients of replicas must exist when their layer's backward ends",
    ),
    Rule("use_transformer_engine_op_fuser", _set, "fused operators keep their own references to the weights"),
    Rule("moe_single_grouped_weight", _set, "one tensor for all experts has no room for replicas"),
    Rule("moe_single_grouped_bias", _set, "one tensor for all experts has no room for replicas"),
    Rule("moe_use_legacy_grouped_gemm", _set, "the legacy GroupedMLP has no room for replicas; use TEGroupedMLP"),
    Rule("moe_ncclep_zero_copy", _set, "its communication buffers belong to homes only"),
    Rule("moe_router_padding_for_quantization", _set, "pads logical experts for fp8; train the experts in bf16"),
    Rule("moe_router_padding_for_fp8", _set, "pads logical experts for fp8; train the experts in bf16"),
    Rule("cpu_offloading", _set, "offloading moves weights that replicas are fetched from"),
    Rule("fine_grained_activation_offloading", _set, "offloaded expert inputs are not tested with replicas"),
    Rule("gtp_weight_remat_size", _more_than_one, "expert weights are sharded already"),
    Rule("expert_gtp_weight_remat_size", _more_than_one, "expert weights are sharded already"),
    Rule(
        "transformer_impl",
        lambda value: value == "inference_optimized",
        "FSSDP is for training; use transformer_engine or local",
    ),
)
JOB = (
    Rule("use_megatron_fsdp", _set, "Megatron-FSDP owns the expert weights; use the distributed optimizer"),
    Rule("use_torch_fsdp2", _set, "FSDP2 owns the expert weights; use the distributed optimizer"),
)


def find(settings: Any, table: tuple[Rule, ...]) -> list[str]:
    """Settings of a ``TransformerConfig`` or of Megatron's arguments that FSSDP does not combine with, a line each."""
    problems = []
    for rule in table:
        value = getattr(settings, rule.setting, None)
        if rule.unsupported(value):
            problems.append(f"--moe-fssdp with {rule.setting}={value!r}: {rule.instead}")
    return problems
