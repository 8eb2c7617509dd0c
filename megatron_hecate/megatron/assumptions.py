"""Assumptions about Megatron and TransformerEngine, checked when FSSDP is switched on.

* `ASSUMPTIONS`: names and parameters of Megatron that we use or override.
* `TRAINING_ASSUMPTIONS`: names that `enable` and `entry` wrap, because no object exists yet that
  could be converted, and ``megatron.training``'s writers of metrics.
* `BRIDGE_ASSUMPTIONS`, `BRIDGE_METRICS`: names of Megatron-Bridge that `bridge` uses, and that its
  ``Metrics`` uses in addition.
* `TE_ASSUMPTIONS`, `FUSED_ASSUMPTIONS`: attributes of TransformerEngine's modules.

Names in frameworks are in `frameworks`, settings that FSSDP does not combine with in `unsupported`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

from packaging.version import InvalidVersion, Version

# Versions of megatron-core, from OLDEST to before TOO_NEW. A build before a release, such as
# 0.20.0rc0, counts as the release.
OLDEST = (0, 16, 1)
TOO_NEW = (0, 21)
# Version string of Megatron-LM's main branch until 2026-03-31, two months after the branch of 0.16.
# Frameworks pin such commits; whether one is recent enough is seen from the names alone.
MAIN_BEFORE_0_17 = "0.16.0rc0"


@dataclasses.dataclass(frozen=True)
class _Assumption:
    """Name in Megatron that we rely on.

    Args:
        name: ``module:attribute``, the module relative to ``megatron``.
        takes: parameters or fields that must exist.
        why: our use of the name.
    """

    name: str
    takes: tuple[str, ...]
    why: str


def _table(text: str) -> tuple[_Assumption, ...]:
    """Read assumptions from ``text``: lines with a module, and below each its names.

    A name stands as ``name(what it must take): our use``; further lines of it are indented more.
    """
    rows = []
    module = ""
    for line in re.sub(r"\n {3,}", " ", inspect.cleandoc(text)).splitlines():
        if not line.startswith(" "):
            module = line
            continue
        name, _, why = line.strip().partition(": ")
        path, _, parameters = name.removesuffix(")").partition("(")
        rows.append(_Assumption(f"{module}:{path}", tuple(re.findall(r"\w+", parameters)), why))
    return tuple(rows)


ASSUMPTIONS = _table(
    """
    core.transformer.moe.moe_layer
      MoELayer.route(hidden_states): overridden: routes tokens and records loads
      MoELayer.preprocess(hidden_states, probs, routing_map): overridden: maps experts to physical
          experts
      MoELayer.dispatch: overridden: adds spans to traces
      MoELayer.routed_experts_compute: overridden: adds spans to traces
      MoELayer.combine: overridden: adds spans to traces
      MoELayer.backward_dw(routed_experts, shared_experts): overridden: delayed gradients are
          complete after the call for shared experts
    core.transformer.moe.experts
      TEGroupedMLP.backward_dw: overridden: computes the twin's gradients
      SequentialMLP.forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs):
          overridden: replicas compute, too
      TEGroupedMLP.forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs):
          overridden: replicas compute, too
      SequentialMLP.sharded_state_dict: overridden: restores homes first
      TEGroupedMLP.sharded_state_dict: overridden: restores homes first
    core.transformer.moe.token_dispatcher
      MoEAlltoAllTokenDispatcher(num_local_experts, local_expert_indices, config, pg_collection):
          built over physical experts
      MoEAlltoAllTokenDispatcher.preprocess: overridden: sets num_out_tokens, splits and
          num_global_tokens_per_local_expert
      MoEAlltoAllTokenDispatcher._maybe_update_cuda_sync_point(point): called where preprocess calls
          it
      MoEAllGatherTokenDispatcher(num_local_experts, local_expert_indices, config, pg_collection):
          built over physical experts
      MoEFlexTokenDispatcher(num_local_experts, local_expert_indices, config, pg_collection): built
          over physical experts
      get_align_size_for_quantization(config): padding within a rank's budget of tokens
    core.process_groups_config
      ProcessGroupCollection(ep, expt_tp, tp_ep): the dispatcher's groups
    core.transformer.transformer_layer
      TransformerLayer.__init__(config, submodules, layer_number): self_attention runs before mlp:
          replicas are prefetched during attention
    core.parallel_state
      get_pipeline_model_parallel_rank: gives the number of microbatches in flight on this stage
      get_expert_data_parallel_rank: determines the rank that records a stage
      get_expert_data_parallel_group: gives the ranks with the same homes
      get_pipeline_model_parallel_group: gives the stages with one log of metrics
    core.full_cuda_graph
      FullCudaGraphWrapper.cuda_graph: holds the graph of training iterations
      FullCudaGraphWrapper.curr_iteration: counts replays, which run no Python
    core.transformer.moe.router_replay
      RouterReplayAction.REPLAY_FORWARD: target_topk_idx holds future routes
    core.tensor_parallel.random
      is_checkpointing: distinguishes a checkpointed forward from evaluation
    core.transformer.multi_token_prediction
      MultiTokenPredictionBlock.forward: runs each layer mtp_num_layers times with
          mtp_use_repeated_layer
    core.num_microbatches_calculator
      get_num_microbatches: an estimate for the first iteration, and an entry of records
      _GLOBAL_NUM_MICROBATCHES_CALCULATOR: None if the training loop sets no number of microbatches
    core.distributed.distributed_data_parallel
      DistributedDataParallel._make_forward_pre_hook: identifies DDP's hooks by this name; they run
          before parameters are read
    core.distributed.param_and_grad_buffer
      _ParamAndGradBucketGroup.start_param_sync: called to gather experts' parameters at the same
          point on all ranks
      _ParamAndGradBucketGroup.finish_param_sync(skip_next_bucket_dispatch): called to wait for
          experts' parameters at the same point on all ranks
      _ParamAndGradBucketGroup.start_grad_sync: overridden: starts a reduction after all earlier
          groups have started
      _ParamAndGradBucketGroup.reset: overridden: runs in every iteration
    """
)
TRAINING_ASSUMPTIONS = _table(
    """
    core.distributed
      DistributedDataParallel(config, module): construction watched: converts a model before DDP
          wraps it
    training.arguments
      add_megatron_arguments(parser): wrapped: adds the flags
    training.global_vars
      get_tensorboard_writer: writes metrics
      get_wandb_writer: writes metrics
    """
)
BRIDGE_ASSUMPTIONS = _table(
    """
    bridge.training.pretrain
      runtime_config_update(cfg): wrapped: makes the settings final
    bridge.training.config
      ConfigContainer(model, ddp, dist, peft): holds the settings that we check
    """
)
BRIDGE_METRICS = _table(
    """
    bridge.training.callbacks
      Callback.on_train_start(context): overridden: logs metrics
      Callback.on_train_step_end(context): overridden: logs metrics
      Callback.on_train_end(context): overridden: logs metrics
      CallbackContext(state, model): gives access to the loggers
    bridge.training.state
      GlobalState.tensorboard_logger: logs metrics
      GlobalState.wandb_logger: logs metrics
      GlobalState.mlflow_logger: logs metrics
      GlobalState.comet_logger: logs metrics
    """
)


# Attributes of TransformerEngine's GroupedLinear, and of Megatron's class around it, that
# `grouped_linear` uses. Another assumption is that of `stored_weights`: ``get_metadata`` of
# TransformerEngine's QuantizedTensor returns all arguments of its constructor but shape and dtype.
TE_ASSUMPTIONS = {
    "num_gemms": "larger in the twin",
    "weight0": "one parameter per expert",
    "bias0": "one per expert, or an empty tensor without biases",
    "quantizers": "one per GEMM: the twin has its own",
    "fp8_meta": "one per GEMM: the twin has its own",
    "_fp8_workspaces": "TE's cache of quantized weights: the twin drops its own if weights change",
    "fuse_wgrad_accumulation": "if true, GEMMs add to main_grad",
    "is_first_microbatch": "if true, GEMMs overwrite main_grad: never after the twin ran",
    "wgrad_store": "queue of delayed weight gradients: the twin has its own",
    "wgrad_accumulation_and_reduce_hooks": "DDP's hooks on complete weight gradients",
}
# attributes of Megatron's TEGroupedMLP with operators of TransformerEngine that `grouped_linear`
# uses
FUSED_ASSUMPTIONS = {
    "_make_fused_ops": "builds two GroupedLinear operators around an activation",
    "_fused_ops": "operators of the forward, or None",
}


def broken_assumptions(assumptions: tuple[_Assumption, ...] = ASSUMPTIONS) -> list[str]:
    """Return one line for each assumption that does not hold for the installed Megatron."""
    import megatron.core

    version = megatron.core.__version__
    problems = []
    if not _is_supported(version):
        oldest = ".".join(map(str, OLDEST))
        problems.append(f"megatron-core {version} is outside {oldest} to 0.20")
    for assumption in assumptions:
        problem = _find_problem(assumption)
        if problem is not None:
            problems.append(problem)
    return problems


def require(assumptions: tuple[_Assumption, ...], *, module: str, by: str) -> None:
    """Raise ImportError if any assumption is broken.

    Args:
        assumptions: assumptions of a module that is imported.
        module: name of the module.
        by: short name of the package that the assumptions are about.
    """
    if problems := broken_assumptions(assumptions):
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ImportError(f"{module} does not fit this {by}:{listed}")


def _is_supported(version: str) -> bool:
    try:
        installed = Version(version)
    except InvalidVersion:
        return False
    return OLDEST <= installed.release < TOO_NEW or installed.public == MAIN_BEFORE_0_17


def _find_problem(assumption: _Assumption) -> str | None:
    """Return a line about a broken ``assumption``, or ``None``."""
    module, _, path = assumption.name.partition(":")
    shown = f"megatron.{assumption.name} ({assumption.why})"
    try:
        value: Any = importlib.import_module(f"megatron.{module}")
        for part in path.split("."):
            value = getattr(value, part)
        names = set(getattr(value, "__dataclass_fields__", ()))
        if callable(value):
            names |= set(inspect.signature(value).parameters)
    except (ImportError, AttributeError) as error:
        return f"{shown} is gone: {error}"
    missing = sorted(set(assumption.takes) - names)
    if missing:
        return f"{shown} no longer takes {', '.join(missing)}"
    return None
