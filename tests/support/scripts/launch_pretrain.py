"""A pretraining script for the flags of any launch script: the example's, with every layout of ranks.

It has no code of FSSDP. The last line of its log counts tokens: those that experts computed, and those of replicas.
``SKEW`` is added to the router's logits of the experts whose home is the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pretrain_gpt
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from replica_tokens import ReplicaTokens

SKEW = 2.0


def forward_step(
    data_iterator: Iterator[dict], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable]:
    """Run one microbatch, or plan it for Megatron's combined schedule."""
    batch = get_batch_on_this_cp_rank(
        next(data_iterator), is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    loss_mask = batch["loss_mask"]
    arguments = (batch["tokens"], batch["position_ids"], None)
    keywords = {"labels": batch["labels"], "loss_mask": loss_mask}
    if not return_schedule_plan:
        output = model(*arguments, **keywords)
    else:
        output = model.build_schedule_plan(*arguments, **keywords)
    return output, partial(pretrain_gpt.loss_func, loss_mask)


class Sequences(torch.utils.data.Dataset):
    """Sequences in which a token mostly follows from the one before it, by number of the sample."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self.count = count
        self.length = length
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = torch.Generator().manual_seed(int(index))
        steps = torch.randint(1, 4, (self.length + 1,), generator=numbers)
        tokens = steps.cumsum(0) % self.vocabulary
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self.length),
            "position_ids": torch.arange(self.length),
        }


def datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple:
    """Build the training dataset; there is no validation."""
    args = get_args()
    return Sequences(num_samples[0], args.seq_length, args.vocab_size), None, None


def skew(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Make the first rank's experts hot, as a pre-wrap hook of Megatron."""
    for layer in (m for chunk in chunks for m in chunk.modules() if isinstance(m, MoELayer)):
        bias = torch.zeros(layer.config.num_moe_experts)
        bias[: layer.num_local_experts] = SKEW
        gating = layer.router.gating
        layer.router.gating = lambda hidden, gating=gating, bias=bias: gating(hidden) + bias
    return chunks


def main() -> None:
    """Train with the flags of the command line."""
    args = parse_and_validate_args()
    tokens = ReplicaTokens()
    model_config = gpt_config_from_args(args)
    model_config.pre_wrap_hooks.append(skew)
    datasets.is_distributed = True
    config = pretrain_cfg_container_from_args(args, model_config)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    both = torch.tensor([tokens.all, tokens.of_replicas])
    dist.all_reduce(both)
    print(f"tokens: {both[0]} computed, {both[1]} by replicas", flush=True)


if __name__ == "__main__":
    main()
