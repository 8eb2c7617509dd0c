"""Everything we assume about Megatron and TransformerEngine, in one place, checked when FSSDP is switched on.

`ASSUMPTIONS` lists the names and parameters we use or override, `UNSUPPORTED` the settings we do not combine with.
`TRAINING_ASSUMPTIONS` are the two functions of ``megatron.training`` that `enable` wraps, because no object exists yet
that could be converted.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from packaging.version import Version

OLDEST, TOO_NEW = Version("0.16.1"), Version("0.21.0a0")  # megatron-core


@dataclasses.dataclass(frozen=True)
class _Assumption:
    """A name in Megatron we rely on.

    Args:
        name: ``module:attribute``, the module relative to ``megatron``.
        takes: parameters it must have.
        why: what we do with it.
    """

    name: str
    takes: tuple[str, ...]
    why: str


_DISPATCHER = ("num_local_experts", "local_expert_indices", "config", "pg_collection")
_EXPERTS = ("permuted_local_hidden_states", "tokens_per_expert", "permuted_probs")
ASSUMPTIONS = (
    _Assumption(
        "core.transformer.moe.moe_layer:MoELayer.route", ("hidden_states",), "overridden: loads are observed here"
    ),
    _Assumption(
        "core.transformer.moe.moe_layer:MoELayer.preprocess",
        ("hidden_states", "probs", "routing_map"),
        "overridden: experts become physical experts here",
    ),
    *(
        _Assumption(f"core.transformer.moe.moe_layer:MoELayer.{name}", (), "overridden: timed in traces")
        for name in ("dispatch", "routed_experts_compute", "combine")
    ),
    _Assumption("core.transformer.moe.experts:SequentialMLP.forward", _EXPERTS, "overridden: replicas join here"),
    _Assumption("core.transformer.moe.experts:TEGroupedMLP.forward", _EXPERTS, "overridden: replicas join here"),
    _Assumption(
        "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher", _DISPATCHER, "built over physical experts"
    ),
    _Assumption(
        "core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher", _DISPATCHER, "built over physical experts"
    ),
    _Assumption(
        "core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher", _DISPATCHER, "built over physical experts"
    ),
    _Assumption(
        "core.process_groups_config:ProcessGroupCollection", ("ep", "expt_tp", "tp_ep"), "the dispatcher's groups"
    ),
    _Assumption(
        "core.transformer.transformer_layer:TransformerLayer.__init__",
        ("self", "config", "submodules", "layer_number"),
        "its self_attention runs before its mlp: replicas are fetched meanwhile",
    ),
    _Assumption(
        "core.parallel_state:get_pipeline_model_parallel_rank", (), "how many microbatches are in flight on this stage"
    ),
    _Assumption("core.tensor_parallel.random:is_checkpointing", (), "tells a checkpointed forward from evaluation"),
    _Assumption("core.num_microbatches_calculator:get_num_microbatches", (), "which backward is the iteration's last"),
    _Assumption(
        "core.num_microbatches_calculator:_GLOBAL_NUM_MICROBATCHES_CALCULATOR", (), "None: the loop does not say"
    ),
    _Assumption(
        "core.distributed.distributed_data_parallel:DistributedDataParallel._make_forward_pre_hook",
        ("self",),
        "the hooks it makes are told by this name, and run before parameters are read",
    ),
)
TRAINING_ASSUMPTIONS = (
    _Assumption("training.arguments:add_megatron_arguments", ("parser",), "wrapped: the flags are added here"),
    _Assumption(
        "training.training:setup_model_and_optimizer",
        ("model_type", "model_provider_func"),
        "wrapped: the hook runs when the model is built",
    ),
)


@dataclasses.dataclass(frozen=True)
class _Unsupported:
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


UNSUPPORTED_WITH_SLOTS = (
    _Unsupported(
        "expert_model_parallel_size",
        lambda size: (size or 1) < 2,
        "FSSDP spreads the load of an expert-parallel group; set --expert-model-parallel-size to 2 or more",
    ),
)
UNSUPPORTED = (
    _Unsupported("fp8", _set, "replicas of quantized weights are not built; train the experts in bf16"),
    _Unsupported("fp4", _set, "replicas of quantized weights are not built; train the experts in bf16"),
    _Unsupported(
        "moe_pad_expert_input_to_capacity",
        _set,
        "an expert would get its capacity on every rank that holds it; drop without padding to capacity",
    ),
    _Unsupported("moe_expert_rank_capacity_factor", _set, "buffers of fixed size per rank are sized for homes only"),
    _Unsupported("moe_paged_stash", _set, "the paged stash is sized for homes only"),
    _Unsupported("cuda_graph_impl", _set, "replicas change every iteration and cannot be captured; set it to none"),
    _Unsupported("enable_cuda_graph", _set, "replicas change every iteration and cannot be captured"),
    _Unsupported("external_cuda_graph", _set, "replicas change every iteration and cannot be captured"),
    _Unsupported("delay_wgrad_compute", _set, "gradients of replicas must exist when their layer's backward ends"),
    _Unsupported(
        "overlap_dispatch_backward_with_experts_wgrad",
        _set,
        "gradients of replicas must exist when their layer's backward ends",
    ),
    _Unsupported("use_transformer_engine_op_fuser", _set, "fused operators keep their own references to the weights"),
    _Unsupported("moe_single_grouped_weight", _set, "one tensor for all experts has no room for replicas"),
    _Unsupported("moe_single_grouped_bias", _set, "one tensor for all experts has no room for replicas"),
    _Unsupported(
        "moe_use_legacy_grouped_gemm", _set, "the legacy GroupedMLP has no room for replicas; use TEGroupedMLP"
    ),
    _Unsupported("moe_ncclep_zero_copy", _set, "its communication buffers belong to homes only"),
    _Unsupported(
        "moe_router_padding_for_quantization", _set, "pads logical experts for fp8; train the experts in bf16"
    ),
    _Unsupported("moe_router_padding_for_fp8", _set, "pads logical experts for fp8; train the experts in bf16"),
    _Unsupported("mtp_use_repeated_layer", _set, "a layer that runs several times per microbatch cannot count them"),
    _Unsupported("cpu_offloading", _set, "offloading moves weights that replicas are fetched from"),
    _Unsupported("fine_grained_activation_offloading", _set, "offloaded expert inputs are not tested with replicas"),
    _Unsupported("gtp_weight_remat_size", _more_than_one, "expert weights are sharded already"),
    _Unsupported("expert_gtp_weight_remat_size", _more_than_one, "expert weights are sharded already"),
    _Unsupported(
        "transformer_impl",
        lambda value: value == "inference_optimized",
        "FSSDP is for training; use transformer_engine or local",
    ),
)
UNSUPPORTED_ARGUMENTS = (
    _Unsupported("use_megatron_fsdp", _set, "Megatron-FSDP owns the expert weights; use the distributed optimizer"),
    _Unsupported("use_torch_fsdp2", _set, "FSDP2 owns the expert weights; use the distributed optimizer"),
)


def broken_assumptions(assumptions: tuple[_Assumption, ...] = ASSUMPTIONS) -> list[str]:
    """What this Megatron has that we do not expect, a line each; empty when all is well."""
    import megatron.core

    version = Version(megatron.core.__version__)
    problems = []
    if not OLDEST <= version < TOO_NEW:
        problems.append(f"megatron-core {version} is outside {OLDEST} to 0.20")
    for assumption in assumptions:
        module, _, path = assumption.name.partition(":")
        try:
            found: Any = importlib.import_module(f"megatron.{module}")
            for part in path.split("."):
                found = getattr(found, part)
            known = set(inspect.signature(found).parameters) if callable(found) else set()
            known |= set(getattr(found, "__dataclass_fields__", ()))
        except (ImportError, AttributeError) as error:
            problems.append(f"megatron.{assumption.name} ({assumption.why}) is gone: {error}")
            continue
        if missing := sorted(set(assumption.takes) - known):
            problems.append(f"megatron.{assumption.name} ({assumption.why}) no longer takes {', '.join(missing)}")
    return problems


def unsupported_settings(settings: Any, table: tuple[_Unsupported, ...] = UNSUPPORTED) -> list[str]:
    """Settings of a ``TransformerConfig`` or of Megatron's arguments that FSSDP does not combine with, a line each."""
    problems = []
    for rule in table:
        value = getattr(settings, rule.setting, None)
        if rule.unsupported(value):
            problems.append(f"--moe-fssdp with {rule.setting}={value!r}: {rule.instead}")
    return problems
