"""Pretrain a GPT with ``megatron.training`` from the megatron-core wheel.

The wheel ships no pretraining script. This is a small version of Megatron-LM's
``pretrain_gpt.py`` without any code of FSSDP: tensor and context parallel size 1, text from
``--data-path``. ``HECATE_PROBE=FOLDER`` records losses, loads and step times in that folder (see
probe.py), and ``HECATE_SKEW=NUMBER`` makes some experts hot.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron.core.datasets.utils as dataset_utils
import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split
from plain_adam import load_without_grad, use_plain_adam
from torch import Tensor

KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute the summed loss of a microbatch, its number of tokens, and the loss to log."""
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    logged = torch.cat([loss.detach().view(1), num_tokens.detach().view(1)])
    return loss, num_tokens, {"lm loss": logged}


def forward_step(
    data_iterator: Iterator[dict], model: Any, record: Callable | None = None
) -> tuple[Tensor, Callable]:
    """Run one microbatch through ``model``; ``record``: a `probe.Probe`."""
    batch = next(data_iterator)
    tokens, labels, loss_mask, attention_mask, position_ids = (
        batch[key].cuda(non_blocking=True) for key in KEYS
    )
    if record is None:
        output = model(tokens, position_ids, attention_mask, labels=labels)
        return output, partial(loss_func, loss_mask)
    record.microbatch_begins(training=model.training)
    output = model(tokens, position_ids, attention_mask, labels=labels)
    return output, record.losses(partial(loss_func, loss_mask), training=model.training)


def datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple:
    """Build the training, validation and test datasets."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()


def probe_settings() -> tuple[str, float]:
    """Return the probe's folder and skew from the environment; an empty folder without a probe."""
    folder = os.environ.get("HECATE_PROBE", "")
    text = os.environ.get("HECATE_SKEW", "0")
    try:
        skew = float(text)
    except ValueError:
        sys.exit(f"HECATE_SKEW={text!r} must be a number, such as 3")
    if skew and not folder:
        sys.exit(f"HECATE_SKEW={text} needs HECATE_PROBE=FOLDER: the probe makes experts hot")
    return folder, skew


def main() -> None:
    """Train with the flags of the command line."""
    folder, skew = probe_settings()
    # Megatron runs make for its data helpers when training starts; its wheel has compiled helpers,
    # but no Makefile.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        dataset_utils.compile_helpers = lambda: None
    load_without_grad()
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        use_plain_adam()
    args = parse_and_validate_args()
    model_config = gpt_config_from_args(args)
    step = forward_step
    if folder:
        from probe import Probe

        probe = Probe(folder, skew=skew)
        model_config.pre_wrap_hooks.append(probe.watch)
        step = partial(forward_step, record=probe)
    # Every rank builds its own data pipeline; by default Megatron builds it on some ranks only.
    datasets.is_distributed = True
    config = pretrain_cfg_container_from_args(args, model_config)
    pretrain(config, datasets, ModelType.encoder_or_decoder, step)
    if folder:
        probe.close()


if __name__ == "__main__":
    main()
