"""What Megatron is doing: which forward runs, and how many microbatches there are."""

from __future__ import annotations

import enum
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from megatron.core.transformer import cuda_graphs
from torch.nn import Module


def num_microbatches() -> int | None:
    """M of this iteration, or ``None`` in a training loop that does not use Megatron's microbatch calculator."""
    from megatron.core import num_microbatches_calculator as calculator

    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        return None
    return calculator.get_num_microbatches()


def name_of_layer(layer: Module) -> str:
    """Tells a model's MoE layers apart: Megatron numbers those of multi-token prediction from 1 again."""
    return f"{'mtp ' if getattr(layer, 'is_mtp_layer', False) else ''}layer {layer.layer_number}"


def captures_graph() -> bool:
    """Whether Megatron, or TransformerEngine for it, is capturing CUDA graphs, or warms up to: nothing trains now."""
    return cuda_graphs.is_graph_capturing()


class Forward(enum.Enum):
    """What a layer's forward is for."""

    MICROBATCH = "a microbatch's own training forward"
    RECOMPUTED = "one more time, inside the backward"
    OTHER = "evaluation, or without gradients"

    @classmethod
    def running(cls, layer: Module, *, gradients: bool | None) -> Forward:
        """What the running forward of ``layer`` is for.

        Under a checkpoint the first pass has no gradients, so it is the model chunk's forward around it that tells
        training from evaluation.

        Args:
            gradients: whether that forward has them; ``None`` where none is running (``build_schedule_plan``).
        """
        if torch._C._current_graph_task_id() != -1:
            return cls.RECOMPUTED
        trains = layer.training and (
            torch.is_grad_enabled() or (gradients is not False and _is_checkpointed())
        )
        return cls.MICROBATCH if trains else cls.OTHER


def _is_checkpointed() -> bool:
    """Whether the running code will be computed again: by Megatron's checkpoint, or by torch's or TE's reentrant one,
    which only the stack tells of."""
    from megatron.core.tensor_parallel.random import is_checkpointing

    if is_checkpointing():
        return True
    found = [torch.utils.checkpoint.CheckpointFunction]
    if (te := sys.modules.get("transformer_engine.pytorch.distributed")) is not None:
        found.append(te._CheckpointFunction)
    codes = [function.forward.__code__ for function in found]
    frame = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def passes_per_microbatch(layers: Sequence[Module], chunks: Sequence[Module]) -> list[int]:
    """How often a training forward runs each of ``layers``, which are in ``chunks``. With ``mtp_use_repeated_layer``
    those of multi-token prediction run once for each token that is predicted; in hybrid models nothing marks them."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    passes = dict.fromkeys(layers, 1)
    for block in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(block, MultiTokenPredictionBlock) and getattr(
            block.config, "mtp_use_repeated_layer", False
        ):
            passes |= {
                module: block.config.mtp_num_layers
                for module in block.modules()
                if module in passes
            }
    return list(passes.values())


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
