"""Megatron-Bridge and its recipes on CPU ranks, over gloo.

Importing this module puts a CPU behind ``torch.cuda`` and TransformerEngine, stand-ins in the place of packages that
Bridge imports without need, and small models in the place of the hub's. Experts are TransformerEngine's, all else is
Megatron's own. Overrides (see ``recipe_runs.py``) then make a recipe fit. As a script it runs a script that knows
nothing of it, as ``examples/run_on_cpu.py`` does.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SUPPORT = ROOT / "tests" / "support"
HERE = ROOT / "tests" / "bridge"
sys.path[:0] = map(str, [ROOT, SUPPORT, *SUPPORT.glob("*/"), HERE, ROOT / "examples"])
# the process that ranks are forked from knows it by another name
sys.modules["bridge_on_cpu"] = sys.modules[__name__]
os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.simplefilter("ignore")

import megatron_on_cpu  # noqa: E402
import packages_on_cpu  # noqa: E402, F401

logging.disable(logging.INFO)
import megatron.bridge  # noqa: E402
import megatron.bridge.models.conversion.auto_bridge as auto_bridge  # noqa: E402
import megatron.bridge.models.glm.glm45_bridge as glm45_bridge  # noqa: E402
import megatron.bridge.models.gpt_provider as gpt_provider  # noqa: E402
import megatron.bridge.models.hf_pretrained.causal_lm as causal_lm  # noqa: E402
import megatron.bridge.training.eval as bridge_eval  # noqa: E402
import megatron.bridge.training.initialize as bridge_initialize  # noqa: E402
import megatron.bridge.training.train as bridge_train  # noqa: E402
from megatron.bridge.models.gpt.gpt_builder import GPTModelConfig  # noqa: E402
from megatron.bridge.models.transformer_config import TransformerConfig  # noqa: E402
from megatron.bridge.training.config import ConfigContainer  # noqa: E402
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides  # noqa: E402
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # noqa: E402
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from recipe_runs import FREE, MODELS, OVERRIDES, QWEN3, QWEN3_OF_0_4, SIZES  # noqa: E402
from transformers import AutoConfig, PretrainedConfig  # noqa: E402


def model_of_the_hub(path: str, **kwargs: Any) -> PretrainedConfig:
    """A small configuration of the right architecture, in the place of the hub's."""
    model_type, architecture, own = MODELS[Path(path).name]
    config = AutoConfig.for_model(model_type, **SIZES, **own)
    config.architectures, config._name_or_path = [architecture], path
    return config


def _local_layers(config: Any, **kwargs: Any) -> Any:
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, **kwargs
    )


auto_bridge.safe_load_config_with_retry = causal_lm.safe_load_config_with_retry = model_of_the_hub
LocalSpecProvider.grouped_mlp_modules = TESpecProvider.grouped_mlp_modules
gpt_provider.transformer_engine_layer_spec = _local_layers
_mtp = gpt_layer_specs.get_gpt_mtp_block_spec
gpt_layer_specs.get_gpt_mtp_block_spec = lambda *args, **kwargs: _mtp(
    *args, **{**kwargs, "use_transformer_engine": False}
)
glm45_bridge.HAVE_TE = False
bridge_initialize.compile_helpers = lambda: None  # the wheel has them, but no Makefile
bridge_initialize._warmup_jit_function = lambda *args, **kwargs: None  # nothing is compiled here
for loop in (bridge_train, bridge_eval):  # modelopt's, which says that there is nothing to adjust
    loop.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None
megatron_on_cpu.for_training()


def recipe(*overrides: str, name: str = QWEN3) -> ConfigContainer:
    """The recipe ``module:function``, made to fit."""
    ours = [*OVERRIDES]
    if megatron.bridge.__version__.startswith("0.4."):
        name = QWEN3_OF_0_4
        ours[ours.index("dataset.seq_length=64")] = "dataset.sequence_length=64"
    module, _, function = name.partition(":")
    config = getattr(importlib.import_module(f"megatron.bridge.recipes.{module}"), function)()
    return process_config_with_overrides(config, cli_overrides=[*ours, *overrides])


def enabled(*overrides: str, name: str = QWEN3, **settings: Any) -> ConfigContainer:
    """The recipe with FSSDP, where copies cost nothing."""
    from megatron_hecate import bridge

    config = recipe(*overrides, name=name)
    bridge.enable(config, speeds=FREE, **settings)
    return config


def as_model_config(provider: Any) -> GPTModelConfig:
    """The same model by Megatron's newer kind of configuration."""
    values = {f.name: getattr(provider, f.name) for f in dataclasses.fields(provider)}

    def of(kind: type) -> dict[str, Any]:
        names = {f.name for f in dataclasses.fields(kind) if f.init}
        return {name: value for name, value in values.items() if name in names}

    model = {**of(GPTModelConfig), "transformer": TransformerConfig(**of(TransformerConfig))}
    model["transformer_layer_spec"] = lambda config, **kwargs: _local_layers(
        config.transformer, **kwargs
    )
    return GPTModelConfig(**model)
