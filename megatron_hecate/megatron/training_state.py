"""State of Megatron's training loop: purpose of the running forward, number of microbatches."""

from __future__ import annotations

import enum
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.utils.checkpoint
from megatron.core.transformer import cuda_graphs
from torch.nn import Module


def num_microbatches() -> int | None:
    """Microbatches per iteration; ``None`` without Megatron's microbatch calculator."""
    from megatron.core import num_microbatches_calculator as calculator

    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        return None
    return calculator.get_num_microbatches()


def name_of_layer(layer: Module) -> str:
    """Name a MoE layer uniquely: Megatron numbers layers of multi-token prediction from 1 again."""
    prefix = "mtp " if getattr(layer, "is_mtp_layer", False) else ""
    return f"{prefix}layer {layer.layer_number}"


# Whether CUDA graphs are captured or warmed up, by Megatron or TE; nothing trains then.
captures_graph: Callable[[], bool] = cuda_graphs.is_graph_capturing


class Forward(enum.Enum):
    """Purpose of a layer's forward."""

    MICROBATCH = "a microbatch's own training forward"
    RECOMPUTED = "one more time, inside the backward"
    OTHER = "evaluation, or without gradients"

    @classmethod
    def classify(cls, layer: Module, *, gradients: bool | None) -> Forward:
        """Determine the purpose of the running forward of ``layer``.

        Under a checkpoint the first pass has no gradients, so the model chunk's forward around the
        pass distinguishes training from evaluation.

        Args:
            layer: MoE layer.
            gradients: whether the model chunk's forward computes gradients; ``None`` outside of
                such a forward (``build_schedule_plan``).
        """
        if torch._C._current_graph_task_id() != -1:
            return cls.RECOMPUTED
        trains = layer.training and (
            torch.is_grad_enabled() or (gradients is not False and _is_checkpointed())
        )
        return cls.MICROBATCH if trains else cls.OTHER


def _is_checkpointed() -> bool:
    """Whether the running code will be recomputed, by a checkpoint of Megatron, torch or TE."""
    from megatron.core.tensor_parallel.random import is_checkpointing

    if is_checkpointing():
        return True
    # a reentrant checkpoint of torch or TE is visible on the stack only
    functions = [torch.utils.checkpoint.CheckpointFunction]
    if (te := sys.modules.get("transformer_engine.pytorch.distributed")) is not None:
        functions.append(te._CheckpointFunction)
    codes = [function.forward.__code__ for function in functions]
    frame = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def passes_per_microbatch(layers: Iterable[Module], chunks: Sequence[Module]) -> dict[Module, int]:
    """Count the passes of each layer in one training forward.

    With ``mtp_use_repeated_layer`` a layer of multi-token prediction runs once per predicted token.
    The blocks are searched because in hybrid models no attribute marks such a layer.

    Args:
        layers: MoE layers.
        chunks: model chunks with the layers.
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    passes = dict.fromkeys(layers, 1)
    modules = itertools.chain.from_iterable(chunk.modules() for chunk in chunks)
    for block in modules:
        if not isinstance(block, MultiTokenPredictionBlock):
            continue
        if not getattr(block.config, "mtp_use_repeated_layer", False):
            continue
        for module in block.modules():
            if module in passes:
                passes[module] = block.config.mtp_num_layers
    return passes
