"""Megatron-Bridge and its recipes on CPU ranks, over gloo.

Importing this module puts a CPU behind ``torch.cuda``, stand-ins in the place of packages that Bridge imports without
need, small models in the place of the hub's, and gloo where Bridge asks for NCCL by name. `OVERRIDES` then make a
recipe fit: they are Bridge's own, so a script takes them on its command line as well.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "tests", "tests/bridge", "examples")]
os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.simplefilter("ignore")

import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()
import megatron.core.extensions.transformer_engine  # noqa: E402, F401  Megatron looks for the real one: before stand-ins
import megatron.training.training  # noqa: E402, F401

ABSENT = (
    "comet_ml",
    "fast_hadamard_transform",
    "megatron.bridge.diffusion",  # there, but of no interest, and it needs much
    "megatron.energon",
    "mlflow",
    "modelopt",
    "nvidia_resiliency_ext",
    "open_clip",
    "transformer_engine",
)


class _AnyName(abc.ABCMeta):
    """A class that has every attribute, each such a class again."""

    def __getattr__(cls, name: str) -> Any:
        return _stand_in(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyName(name, (), {"__init__": lambda self, *args, **kwargs: None, "__call__": lambda self, f: f})


class _Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `ABSENT` packages and all their modules, in which every name is a class that does nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__version__ = "0"
        module.__getattr__ = _stand_in
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.insert(0, _Packages())
logging.disable(logging.INFO)

import megatron.bridge.models.conversion.auto_bridge as auto_bridge  # noqa: E402
import megatron.bridge.models.gpt_provider as gpt_provider  # noqa: E402
import megatron.bridge.models.hf_pretrained.causal_lm as causal_lm  # noqa: E402
import megatron.bridge.training.initialize as bridge_initialize  # noqa: E402
import megatron.bridge.training.train as bridge_train  # noqa: E402
from transformers import AutoConfig, PretrainedConfig  # noqa: E402

SMALL = dict(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts_per_tok=2,
    vocab_size=512,
)
MODELS = {
    "Qwen3-30B-A3B": ("qwen3_moe", "Qwen3MoeForCausalLM", dict(num_experts=8)),
    "GLM-4.5-Air": (
        "glm4_moe",
        "Glm4MoeForCausalLM",
        dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, num_nextn_predict_layers=1),
    ),
}
# What makes a recipe small enough, and leaves out what needs a GPU.
OVERRIDES = (
    *(f"model.{name}=1" for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")),
    "model.expert_model_parallel_size=2",
    "model.sequence_parallel=false",
    "model.seq_length=64",
    "dataset.seq_length=64",
    "dataset.num_workers=0",
    "+dataset.skip_getting_attention_mask_from_dataset=false",
    "tokenizer.tokenizer_type=NullTokenizer",
    "tokenizer.tokenizer_model=null",
    "tokenizer.vocab_size=500",
    "tokenizer.hf_tokenizer_kwargs={}",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.train_iters=4",
    "scheduler.lr_warmup_iters=1",
    "scheduler.lr_decay_iters=20",
    "optimizer.lr=3e-3",
    "optimizer.min_lr=1e-4",
    "validation.eval_iters=0",
    "logger.log_interval=1",
    "logger.tensorboard_dir=null",
    "checkpoint.save=null",
    "checkpoint.load=null",
    "dist.distributed_backend=gloo",
    "dist.use_gloo_process_groups=true",
    "model.transformer_impl=local",
    "model.moe_flex_dispatcher_backend=null",
    "model.moe_token_dispatcher_type=alltoall",
    *(
        f"model.{name}=false"
        for name in (
            "moe_grouped_gemm",
            "moe_permute_fusion",
            "gradient_accumulation_fusion",
            "apply_rope_fusion",
            "bias_dropout_fusion",
            "bias_activation_fusion",
            "masked_softmax_fusion",
            "persist_layer_norm",
        )
    ),
    "model.cross_entropy_fusion_impl=native",
    # fp32, in which sums of replicas agree with stock to 1e-5
    "mixed_precision=null",
    *(f"{name}=false" for name in ("model.bf16", "optimizer.bf16", "optimizer.use_precision_aware_optimizer")),
    *(
        f"{name}=torch.float32"
        for name in ("model.params_dtype", "model.pipeline_dtype", "model.autocast_dtype", "optimizer.params_dtype")
    ),
)


def _model_of_the_hub(path: str, **kwargs: Any) -> PretrainedConfig:
    """A small configuration of the right architecture, in the place of the hub's."""
    model_type, architecture, own = MODELS[Path(path).name]
    config = AutoConfig.for_model(model_type, **SMALL, **own)
    config.architectures, config._name_or_path = [architecture], path
    return config


def _local_layers(config: Any, **kwargs: Any) -> Any:
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization, **kwargs)


def _local_mtp(config: Any, spec: Any, *, use_transformer_engine: bool, **kwargs: Any) -> Any:
    return get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **kwargs)


from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)

auto_bridge.safe_load_config_with_retry = causal_lm.safe_load_config_with_retry = _model_of_the_hub
gpt_provider.transformer_engine_layer_spec = _local_layers
bridge_initialize.compile_helpers = lambda: None  # the wheel has them, but no Makefile
bridge_train.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None
megatron_on_cpu.for_training()
