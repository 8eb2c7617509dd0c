"""Pretrain Qwen3-30B-A3B by Megatron-Bridge's recipe, with FSSDP and its metrics.

    torchrun --nproc-per-node 8 ... examples/bridge_recipe.py \
        train.train_iters=1000 logger.wandb_project=moe

Arguments are Bridge's overrides. FSSDP's overrides, such as ``+model.moe_fssdp_slots=3``, take
precedence over the settings in this file.
"""

from __future__ import annotations

import sys

from megatron.bridge.recipes.qwen.h100.qwen3_moe import qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

from megatron_hecate import bridge


def main() -> None:
    """Build the recipe's config, enable FSSDP, train."""
    config = qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config()
    bridge.enable(config, slots=2)
    process_config_with_overrides(config, cli_overrides=sys.argv[1:])
    pretrain(config, forward_step, callbacks=[bridge.Metrics()])


if __name__ == "__main__":
    main()
