"""As Megatron-Bridge's ``run_recipe.py``, which knows nothing of FSSDP: a recipe by name, and overrides."""

from __future__ import annotations

import argparse

from megatron.bridge.recipes.qwen.h100 import qwen3_moe
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", required=True)
    args, overrides = parser.parse_known_args()
    config = process_config_with_overrides(
        getattr(qwen3_moe, args.recipe)(), cli_overrides=overrides
    )
    run = pretrain if "pretrain" in args.recipe else finetune
    run(config=config, forward_step_func=forward_step)


if __name__ == "__main__":
    main()
