"""Sizes, layout, start and folder of the running job, for its record and for ``what-if``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.megatron.dispatcher import expert_alignment
from megatron_hecate.megatron.training_globals import training_arguments
from megatron_hecate.megatron.training_state import num_microbatches
from megatron_hecate.plan import LayerShape, World
from megatron_hecate.record.run_folder import RunInfo


def stage_info(
    config: Any,
    *,
    layers: Sequence[str],
    experts: Sequence[int],
    world: World,
    shape: LayerShape,
    **fields: Any,
) -> RunInfo:
    """Describe a pipeline stage of the running job for its record.

    Args:
        config: ``TransformerConfig`` of the model's MoE layers.
        layers: names of the stage's layers, [L].
        experts: number of experts of each layer, [L].
        world: ranks, nodes and speeds.
        shape: sizes of a layer.
        fields: further fields of `RunInfo`.
    """
    return RunInfo(
        layers=tuple(layers),
        num_experts=max(experts),
        ranks=world.num_ranks,
        node=tuple(world.node),
        top_k=config.moe_router_topk,
        shape=dataclasses.asdict(shape),
        speeds=dataclasses.asdict(world.speeds),
        job=_job_sizes(config),
        started=_start_of_attempt(),
        **fields,
    )


def _start_of_attempt() -> str:
    """Return the time at which the first rank asked for it, ISO 8601; the same on all ranks."""
    moment = datetime.now(UTC).isoformat(timespec="milliseconds")
    store = dist.PrefixStore("megatron_hecate/attempt", _get_default_store())
    return store.compare_set("started", "", moment).decode()


def folder_of_model(folder: str) -> str:
    """Return the folder of the next model's files: ``folder``, or a subfolder from the second.

    Models of one attempt may run at the same time. All ranks call it, once per model.
    """
    number = Attempt.current().count(f"folder {Path(folder).absolute()}")
    return folder if number == 1 else str(Path(folder, f"model-{number}"))


def _job_sizes(config: Any) -> dict[str, Any]:
    """Collect the sizes of the job, see `RunInfo.job`; unknown ones are left out.

    Args:
        config: ``TransformerConfig`` of the model's MoE layers.
    """
    stages = config.pipeline_model_parallel_size
    sizes: dict[str, Any] = dict(
        ranks=dist.get_world_size(),
        pp=stages,
        vpp=config.virtual_pipeline_model_parallel_size or 1,
        hidden=config.hidden_size,
        dense_ffn=config.ffn_hidden_size,
        num_layers=config.num_layers,
        heads=config.num_attention_heads,
        groups=config.num_query_groups or config.num_attention_heads,
        head_width=config.kv_channels or config.hidden_size // config.num_attention_heads,
        shared=config.moe_shared_expert_intermediate_size or 0,
        dispatcher=config.moe_token_dispatcher_type,
        recompute=config.recompute_granularity == "full",
        alignment=expert_alignment(config),
        # since Megatron 0.18
        factor=getattr(config, "moe_expert_rank_capacity_factor", None),
    )
    if device_of_rank().type == "cuda":
        properties = torch.cuda.get_device_properties(device_of_rank())
        sizes["device_bytes"] = properties.total_memory
    arguments = training_arguments()
    # Scripts with a setup of their own may have other arguments, or none.
    for name, argument in (("seq", "seq_length"), ("vocab", "padded_vocab_size")):
        if value := getattr(arguments, argument, None):
            sizes[name] = value
    sharded = getattr(arguments, "use_distributed_optimizer", None)
    if sharded is not None:
        sizes["optimizer_shards"] = 1
        if sharded:
            sizes["optimizer_shards"] = parallel_state.get_expert_data_parallel_world_size()
    return sizes


def stock_shape(layer: MoELayer) -> LayerShape:
    """Compute the sizes of an expert as built by Megatron, before the optimizer shards any part."""
    params = list(layer.experts.parameters())
    elements = sum(p.numel() for p in params) / layer.num_local_experts
    width = params[0].element_size()
    size = getattr(layer.config, "moe_latent_size", None) or layer.config.hidden_size
    return LayerShape(
        expert_bytes=elements * width,
        grad_bytes=elements * grad_width(layer),
        token_bytes=size * width,
        token_flops=2.0 * elements,
        microbatches=num_microbatches() or 1,
    )


def grad_width(layer: MoELayer) -> int:
    """Return the bytes of one element of a replica's gradient, as far as DDP has made any."""
    parameter = next(layer.experts.parameters())
    grad = getattr(parameter, "main_grad", None)
    if layer.config.gradient_accumulation_fusion and grad is not None:
        return grad.element_size()
    return max(4, parameter.element_size())
