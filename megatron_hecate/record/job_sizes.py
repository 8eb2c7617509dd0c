"""Sizes and layout of the running job, for its record: the defaults of ``what-if``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.megatron.training_globals import training_arguments
from megatron_hecate.megatron.training_state import forwards_in_flight, num_microbatches
from megatron_hecate.plan import LayerShape
from megatron_hecate.replicas.memory_estimate import ExpertMemory


def job_sizes(config: Any) -> dict[str, Any]:
    """Collect the sizes of the job, see `RunInfo.job`; unknown ones are left out.

    Args:
        config: ``TransformerConfig`` of the model's MoE layers.
    """
    stages = config.pipeline_model_parallel_size
    sizes: dict[str, Any] = dict(
        ranks=dist.get_world_size(),
        pp=stages,
        vpp=config.virtual_pipeline_model_parallel_size or 1,
        tp=config.tensor_model_parallel_size,
        hidden=config.hidden_size,
        ffn=config.moe_ffn_hidden_size,
        dense_ffn=config.ffn_hidden_size,
        num_layers=config.num_layers,
        heads=config.num_attention_heads,
        groups=config.num_query_groups or config.num_attention_heads,
        head_width=config.kv_channels or config.hidden_size // config.num_attention_heads,
        shared=config.moe_shared_expert_intermediate_size or 0,
        dispatcher=config.moe_token_dispatcher_type,
        recompute=config.recompute_granularity == "full",
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
        grad_bytes=elements * max(4, width),
        token_bytes=size * width,
        token_flops=2.0 * elements,
        microbatches=num_microbatches() or 1,
    )


def stock_memory(layer: MoELayer, shape: LayerShape, num_layers: int) -> dict[str, float]:
    """Estimate `RunInfo.memory` of this rank, for ``num_layers`` layers like ``layer``."""
    elements = int(shape.token_flops / 2)
    dtype = next(layer.experts.parameters()).dtype
    buffers = [LayerBuffer(0, elements, dtype, layer.num_local_experts)] * num_layers
    memory = ExpertMemory.estimate(buffers, "iteration")
    return memory_sizes(memory, layer.config, [0] * num_layers, dtype)


def memory_sizes(
    memory: ExpertMemory, config: Any, chunks: Sequence[int], dtype: torch.dtype
) -> dict[str, float]:
    """Return `RunInfo.memory`: expert memory, and activations that the experts keep per token.

    Linears keep their inputs. An activation function keeps its input and, unless it is fused,
    intermediate results. Activations kept by quantization are not counted.

    Args:
        memory: expert memory of this rank.
        config: ``TransformerConfig`` of the model's MoE layers.
        chunks: model chunk of each layer of this rank.
        dtype: dtype of the activations.
    """
    selective = []
    if config.recompute_granularity == "selective":
        selective = config.recompute_modules or []
    is_recomputed = config.recompute_granularity == "full" or "moe" in selective
    gated = bool(config.gated_linear_unit)
    # Tensors of the FFN's width that the activation function keeps.
    if "moe_act" in selective:
        activation_tensors = 0
    elif config.bias_activation_fusion:
        activation_tensors = 1
    else:
        activation_tensors = 2 + 2 * gated
    input_width = getattr(config, "moe_latent_size", None) or config.hidden_size
    ffn_width = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
    width = input_width + (1 + gated + activation_tensors) * ffn_width
    in_flight = 0 if is_recomputed else forwards_in_flight(config, chunks) / len(chunks)
    return {**dataclasses.asdict(memory), "token": width * dtype.itemsize, "kept": in_flight}
