"""Everything we assume about Megatron, in one place, checked when FSSDP is switched on.

`SEAMS` lists the names and parameters we use or override, `REFUSED` the settings we cannot combine with yet. What
cannot be converted as an object, and is patched instead, stands in `enable`: two functions of ``megatron.training``.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch.nn import Module

OLDEST, TOO_NEW = Version("0.16.1"), Version("0.21.0a0")  # megatron-core


@dataclasses.dataclass(frozen=True)
class Seam:
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
SEAMS = (
    Seam("core.transformer.moe.moe_layer:MoELayer.route", ("hidden_states",), "overridden: loads are observed here"),
    Seam(
        "core.transformer.moe.moe_layer:MoELayer.preprocess",
        ("hidden_states", "probs", "routing_map"),
        "overridden: experts become physical experts here",
    ),
    *(
        Seam(f"core.transformer.moe.moe_layer:MoELayer.{name}", (), "overridden: timed in traces")
        for name in ("dispatch", "routed_experts_compute", "combine")
    ),
    Seam("core.transformer.moe.experts:SequentialMLP.forward", _EXPERTS, "overridden: guests join here"),
    Seam("core.transformer.moe.experts:TEGroupedMLP.forward", _EXPERTS, "overridden: guests join here"),
    Seam(
        "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher", _DISPATCHER, "built over physical experts"
    ),
    Seam(
        "core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher", _DISPATCHER, "built over physical experts"
    ),
    Seam("core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher", _DISPATCHER, "built over physical experts"),
    Seam("core.process_groups_config:ProcessGroupCollection", ("ep", "expt_tp", "tp_ep"), "the dispatcher's groups"),
    Seam(
        "core.transformer.transformer_layer:TransformerLayer.__init__",
        ("self", "config", "submodules", "layer_number"),
        "its self_attention runs before its mlp: guests are fetched meanwhile",
    ),
    Seam(
        "core.parallel_state:get_pipeline_model_parallel_rank", (), "how many microbatches are in flight on this stage"
    ),
    Seam("core.tensor_parallel.random:is_checkpointing", (), "tells a checkpointed forward from evaluation"),
    Seam("core.num_microbatches_calculator:get_num_microbatches", (), "which backward is the iteration's last"),
    Seam("core.num_microbatches_calculator:_GLOBAL_NUM_MICROBATCHES_CALCULATOR", (), "None: the loop does not say"),
    Seam(
        "core.distributed.distributed_data_parallel:DistributedDataParallel._make_forward_pre_hook",
        ("self",),
        "the hooks it makes are told by this name, and run before parameters are read",
    ),
)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A Megatron setting FSSDP does not combine with.

    Args:
        setting: field of ``TransformerConfig``, or argument of ``megatron.training``.
        refused: whether this value is refused; a version without the field has ``None``.
        instead: why, and the way out.
    """

    setting: str
    refused: Callable[[Any], bool]
    instead: str


def _more_than_one(value: Any) -> bool:
    return (value or 1) > 1


def _set(value: Any) -> bool:
    return bool(value) and value != "none"


REFUSED_WITH_SLOTS = (
    Refusal(
        "expert_model_parallel_size",
        lambda size: (size or 1) < 2,
        "FSSDP spreads the load of an expert-parallel group; set --expert-model-parallel-size to 2 or more",
    ),
)
REFUSED = (
    Refusal("fp8", _set, "guests of quantized weights are not built; train the experts in bf16"),
    Refusal("fp4", _set, "guests of quantized weights are not built; train the experts in bf16"),
    Refusal(
        "moe_pad_expert_input_to_capacity",
        _set,
        "a lent expert would get its capacity on every rank that holds it; drop without padding to capacity",
    ),
    Refusal("moe_expert_rank_capacity_factor", _set, "buffers of fixed size per rank are sized for homes only"),
    Refusal("moe_paged_stash", _set, "the paged stash is sized for homes only"),
    Refusal("cuda_graph_impl", _set, "guests change every iteration and cannot be captured; set it to none"),
    Refusal("enable_cuda_graph", _set, "guests change every iteration and cannot be captured"),
    Refusal("external_cuda_graph", _set, "guests change every iteration and cannot be captured"),
    Refusal("delay_wgrad_compute", _set, "gradients of guests must exist when their layer's backward ends"),
    Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        _set,
        "gradients of guests must exist when their layer's backward ends",
    ),
    Refusal("use_transformer_engine_op_fuser", _set, "fused operators keep their own references to the weights"),
    Refusal("moe_single_grouped_weight", _set, "one tensor for all experts has no room for guests"),
    Refusal("moe_single_grouped_bias", _set, "one tensor for all experts has no room for guests"),
    Refusal("moe_use_legacy_grouped_gemm", _set, "the legacy GroupedMLP has no room for guests; use TEGroupedMLP"),
    Refusal("moe_ncclep_zero_copy", _set, "its communication buffers belong to homes only"),
    Refusal("moe_router_padding_for_quantization", _set, "pads logical experts for fp8; train the experts in bf16"),
    Refusal("moe_router_padding_for_fp8", _set, "pads logical experts for fp8; train the experts in bf16"),
    Refusal("mtp_use_repeated_layer", _set, "a layer that runs several times per microbatch cannot count them"),
    Refusal("cpu_offloading", _set, "offloading moves weights that guests are fetched from"),
    Refusal("fine_grained_activation_offloading", _set, "offloaded expert inputs are not tested with guests"),
    Refusal("gtp_weight_remat_size", _more_than_one, "expert weights are sharded already"),
    Refusal("expert_gtp_weight_remat_size", _more_than_one, "expert weights are sharded already"),
    Refusal(
        "transformer_impl",
        lambda value: value == "inference_optimized",
        "FSSDP is for training; use transformer_engine or local",
    ),
)
REFUSED_ARGUMENTS = (
    Refusal("use_megatron_fsdp", _set, "Megatron-FSDP owns the expert weights; use the distributed optimizer"),
    Refusal("use_torch_fsdp2", _set, "FSDP2 owns the expert weights; use the distributed optimizer"),
)


def changed_seams(seams: tuple[Seam, ...] = SEAMS) -> list[str]:
    """What this Megatron has that we do not expect, a line each; empty when all is well."""
    import megatron.core

    version = Version(megatron.core.__version__)
    problems = []
    if not OLDEST <= version < TOO_NEW:
        problems.append(f"megatron-core {version} is outside {OLDEST} to 0.20")
    for seam in seams:
        module, _, path = seam.name.partition(":")
        try:
            found: Any = importlib.import_module(f"megatron.{module}")
            for part in path.split("."):
                found = getattr(found, part)
            known = set(inspect.signature(found).parameters) if callable(found) else set()
            known |= set(getattr(found, "__dataclass_fields__", ()))
        except (ImportError, AttributeError) as error:
            problems.append(f"megatron.{seam.name} ({seam.why}) is gone: {error}")
            continue
        if missing := sorted(set(seam.takes) - known):
            problems.append(f"megatron.{seam.name} ({seam.why}) no longer takes {', '.join(missing)}")
    return problems


def refusals(settings: Any, table: tuple[Refusal, ...] = REFUSED) -> list[str]:
    """Settings of a ``TransformerConfig`` or of Megatron's arguments that FSSDP does not combine with, a line each."""
    problems = []
    for rule in table:
        value = getattr(settings, rule.setting, None)
        if rule.refused(value):
            problems.append(f"--moe-fssdp with {rule.setting}={value!r}: {rule.instead}")
    return problems


def num_microbatches() -> int | None:
    """M of this iteration, or ``None`` in a training loop that does not use Megatron's microbatch calculator."""
    from megatron.core import num_microbatches_calculator as calculator

    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        return None
    return calculator.get_num_microbatches()


class Forward(enum.Enum):
    """What a layer's forward is for."""

    MICROBATCH = "a microbatch's own training forward"
    RECOMPUTED = "one more time, inside the backward"
    OTHER = "evaluation, or without gradients"


def purpose_of_forward(layer: Module, *, gradients: bool | None) -> Forward:
    """What the running forward of ``layer`` is for.

    Under Megatron's checkpointing the first pass has no gradients, so it is the model chunk's forward around it that
    tells training from evaluation.

    Args:
        gradients: whether that forward has them; ``None`` where none is running (``build_schedule_plan``).
    """
    from megatron.core.tensor_parallel.random import is_checkpointing

    if torch._C._current_graph_task_id() != -1:
        return Forward.RECOMPUTED
    trains = layer.training and (torch.is_grad_enabled() or (is_checkpointing() and gradients is not False))
    return Forward.MICROBATCH if trains else Forward.OTHER


def is_block(module: Module) -> bool:
    """Whether ``module`` is a transformer layer: attention first, then ``mlp``."""
    return isinstance(getattr(module, "self_attention", None), Module) and hasattr(module, "mlp")


def forwards_in_flight(config: Any, chunks: Sequence[int]) -> int:
    """Forwards of a layer whose backward has not run, of all layers of this rank together, at most.

    From Megatron's schedules (``core/pipeline_parallel/schedules.py``): without pipeline one microbatch; 1F1B runs
    (stages - 1 - stage) ahead; the interleaved one twice that and the other chunks' microbatches, in passes of one
    chunk. The combined schedule (``overlap_moe_expert_parallel_comm``) runs one more ahead.

    Args:
        config: ``TransformerConfig``.
        chunks: the model chunk of every layer of this rank.
    """
    from megatron.core import parallel_state

    stages = config.pipeline_model_parallel_size
    stage = parallel_state.get_pipeline_model_parallel_rank() if stages > 1 else 0
    per_chunk = max(Counter(chunks).values())
    interleaved = config.virtual_pipeline_model_parallel_size or 1
    if stages == 1:
        passes = 1
    elif interleaved == 1:
        passes = stages - stage
    else:
        together = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
        passes = 2 * (stages - stage - 1) + (interleaved - 1) * together + 1
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        passes += 1
    return passes * per_chunk


def gathers_params(module: Module) -> bool:
    """Whether DDP gathers the parameters of ``module`` in the background (``overlap_param_gather``)."""
    return any(_ddp_hooks(submodule) for submodule in module.modules())


def wait_for_params(module: Module) -> None:
    """Make sure that the parameters of ``module`` hold this iteration's values.

    With ``overlap_param_gather`` DDP gathers them in the background and waits in a forward pre-hook of the submodule
    that owns them. Reading them elsewhere would silently read the last iteration's values, so the hooks run here.
    """
    for submodule in module.modules():
        for hook in _ddp_hooks(submodule):
            hook(submodule, ())


def _ddp_hooks(module: Module) -> list[Callable]:
    name = "DistributedDataParallel._make_forward_pre_hook"
    return [hook for hook in module._forward_pre_hooks.values() if name in getattr(hook, "__qualname__", "")]
