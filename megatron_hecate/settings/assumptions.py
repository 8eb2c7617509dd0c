"""Everything we assume about Megatron and TransformerEngine, in one place, checked when FSSDP is switched on.

`ASSUMPTIONS` lists the names and parameters we use or override; settings we do not combine with are in `unsupported`.
`TRAINING_ASSUMPTIONS` are the two functions of ``megatron.training`` that `enable` wraps, because no object exists yet
that could be converted. `BRIDGE_ASSUMPTIONS` are what `bridge` uses of Megatron-Bridge.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

from packaging.version import InvalidVersion, Version

OLDEST, TOO_NEW = (
    (0, 16, 1),
    (0, 21),
)  # megatron-core; its builds before a release, such as 0.20.0rc0, count as it


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
        "core.transformer.moe.moe_layer:MoELayer.route",
        ("hidden_states",),
        "overridden: loads are observed here",
    ),
    _Assumption(
        "core.transformer.moe.moe_layer:MoELayer.preprocess",
        ("hidden_states", "probs", "routing_map"),
        "overridden: experts become physical experts here",
    ),
    *(
        _Assumption(
            f"core.transformer.moe.moe_layer:MoELayer.{name}", (), "overridden: timed in traces"
        )
        for name in ("dispatch", "routed_experts_compute", "combine")
    ),
    _Assumption(
        "core.transformer.moe.moe_layer:MoELayer.backward_dw",
        ("routed_experts", "shared_experts"),
        "overridden: delayed gradients are complete after the call for shared experts",
    ),
    _Assumption(
        "core.transformer.moe.experts:TEGroupedMLP.backward_dw",
        (),
        "overridden: the twin's are computed",
    ),
    _Assumption(
        "core.transformer.moe.experts:SequentialMLP.forward",
        _EXPERTS,
        "overridden: replicas join here",
    ),
    _Assumption(
        "core.transformer.moe.experts:TEGroupedMLP.forward",
        _EXPERTS,
        "overridden: replicas join here",
    ),
    _Assumption(
        "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
        _DISPATCHER,
        "built over physical experts",
    ),
    _Assumption(
        "core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher",
        _DISPATCHER,
        "built over physical experts",
    ),
    _Assumption(
        "core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher",
        _DISPATCHER,
        "built over physical experts",
    ),
    _Assumption(
        "core.process_groups_config:ProcessGroupCollection",
        ("ep", "expt_tp", "tp_ep"),
        "the dispatcher's groups",
    ),
    _Assumption(
        "core.transformer.transformer_layer:TransformerLayer.__init__",
        ("self", "config", "submodules", "layer_number"),
        "its self_attention runs before its mlp: replicas are fetched meanwhile",
    ),
    _Assumption(
        "core.parallel_state:get_pipeline_model_parallel_rank",
        (),
        "how many microbatches are in flight on this stage",
    ),
    _Assumption(
        "core.parallel_state:get_expert_data_parallel_rank", (), "which rank of a stage records it"
    ),
    _Assumption(
        "core.parallel_state:get_expert_data_parallel_group", (), "which ranks have the same homes"
    ),
    *(
        _Assumption(
            f"core.transformer.moe.experts:{name}.sharded_state_dict",
            (),
            "overridden: homes are restored",
        )
        for name in ("SequentialMLP", "TEGroupedMLP")
    ),
    _Assumption(
        "core.parallel_state:get_pipeline_model_parallel_group",
        (),
        "whose metrics are logged together",
    ),
    _Assumption(
        "core.transformer.moe.router_replay:RouterReplayAction.REPLAY_FORWARD",
        (),
        "its target_topk_idx are routes to come",
    ),
    _Assumption(
        "core.tensor_parallel.random:is_checkpointing",
        (),
        "tells a checkpointed forward from evaluation",
    ),
    _Assumption(
        "core.transformer.multi_token_prediction:MultiTokenPredictionBlock.forward",
        ("self",),
        "runs its layers mtp_num_layers times with mtp_use_repeated_layer",
    ),
    _Assumption(
        "core.num_microbatches_calculator:get_num_microbatches",
        (),
        "a guess for the first iteration, and what a record says of the job",
    ),
    _Assumption(
        "core.num_microbatches_calculator:_GLOBAL_NUM_MICROBATCHES_CALCULATOR",
        (),
        "None: the loop does not say",
    ),
    _Assumption(
        "core.distributed.distributed_data_parallel:DistributedDataParallel._make_forward_pre_hook",
        ("self",),
        "the hooks it makes are told by this name, and run before parameters are read",
    ),
    _Assumption(
        "core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync",
        ("self",),
        "dispatches the gather of experts' parameters at the same point on all ranks",
    ),
    _Assumption(
        "core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync",
        ("self", "skip_next_bucket_dispatch"),
        "waits for the gather of experts' parameters at the same point on all ranks",
    ),
    _Assumption(
        "core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
        ("self",),
        "starts a reduction; held back until the groups before have started",
    ),
    _Assumption(
        "core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.reset",
        ("self",),
        "called in every iteration",
    ),
)
TRAINING_ASSUMPTIONS = (
    _Assumption(
        "core.distributed.data_parallel_base:_BaseDataParallel",
        ("config", "module"),
        "its constructor is wrapped: models are converted before they are wrapped",
    ),
    _Assumption(
        "training.arguments:add_megatron_arguments",
        ("parser",),
        "wrapped: the flags are added here",
    ),
    _Assumption(
        "training.training:setup_model_and_optimizer",
        ("model_type", "model_provider_func"),
        "wrapped: the hook runs when the model is built",
    ),
    *(
        _Assumption(f"training.global_vars:get_{name}_writer", (), "metrics go there")
        for name in ("tensorboard", "wandb")
    ),
)
# Methods that read or write a model's weights parameter by parameter, with the model among their arguments.
BRIDGE_CONVERSIONS = (
    "stream_weights_megatron_to_hf",
    "stream_weights_megatron_to_hf_quant",
    "load_weights_hf_to_megatron",
    "stream_weights_hf_to_megatron",
)
BRIDGE_ASSUMPTIONS = (
    _Assumption(
        "bridge.training.pretrain:runtime_config_update",
        ("cfg",),
        "wrapped: settings are final after it",
    ),
    _Assumption(
        "bridge.training.config:ConfigContainer",
        ("model", "ddp", "dist", "peft"),
        "whose settings we check",
    ),
    _Assumption(
        "bridge.models.model_provider:ModelProviderMixin.register_pre_wrap_hook",
        ("hook",),
        "the hook runs there",
    ),
    *(
        _Assumption(
            f"bridge.training.callbacks:Callback.on_train_{when}",
            ("context",),
            "overridden: metrics are logged",
        )
        for when in ("start", "step_end", "end")
    ),
    _Assumption(
        "bridge.training.callbacks:CallbackContext",
        ("state", "model"),
        "where metrics find the loggers",
    ),
    *(
        _Assumption(
            f"bridge.training.state:GlobalState.{name}_logger", (), "metrics are logged there"
        )
        for name in ("tensorboard", "wandb", "mlflow", "comet")
    ),
    *(
        _Assumption(
            f"bridge.models.conversion.model_bridge:MegatronModelBridge.{name}",
            (),
            "wrapped: homes are restored",
        )
        for name in BRIDGE_CONVERSIONS
    ),
)


# Attributes of TransformerEngine's GroupedLinear, and of Megatron's class around it, that `grouped_linear` uses. Of its
# QuantizedTensor `stored_weights` assumes that ``get_metadata`` gives all that it is made of, but shape and dtype.
TE_ASSUMPTIONS = {
    "num_gemms": "the twin has more",
    "weight0": "one parameter per expert",
    "bias0": "one per expert, or an empty tensor where there are no biases",
    "quantizers": "kept per GEMM: the twin has its own",
    "fp8_meta": "kept per GEMM: the twin has its own",
    "_fp8_workspaces": "quantized weights that TE keeps: the twin has its own, dropped when weights change",
    "fuse_wgrad_accumulation": "whether GEMMs add to main_grad",
    "is_first_microbatch": "whether GEMMs overwrite main_grad: never once the twin ran",
    "wgrad_store": "weight gradients to be computed later: the twin has its own",
    "wgrad_accumulation_and_reduce_hooks": "DDP's, run when these are complete",
}
# Attributes of Megatron's TEGroupedMLP that `grouped_linear` uses where it has operators of TransformerEngine.
FUSED_ASSUMPTIONS = {
    "_make_fused_ops": "makes them: two GroupedLinear, and an activation between them",
    "_fused_ops": "those that the forward runs, or None",
}


def broken_assumptions(assumptions: tuple[_Assumption, ...] = ASSUMPTIONS) -> list[str]:
    """What this Megatron has that we do not expect, a line each; empty when all is well."""
    import megatron.core

    version, problems = megatron.core.__version__, []
    try:
        fits = OLDEST <= Version(version).release < TOO_NEW
    except InvalidVersion:
        fits = False
    if not fits:
        problems.append(f"megatron-core {version} is outside {'.'.join(map(str, OLDEST))} to 0.20")
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
            problems.append(
                f"megatron.{assumption.name} ({assumption.why}) no longer takes {', '.join(missing)}"
            )
    return problems
