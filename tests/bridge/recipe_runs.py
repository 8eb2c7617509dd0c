"""Recipes of Megatron-Bridge that the tests run, what makes them small enough for a CPU, and what a run did."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# else no copy pays on so small a model
FREE = str(Path(__file__).parent.parent / "data" / "free_copies.json")
QWEN3 = "qwen.h100.qwen3_moe:qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config"
QWEN3_OF_0_4 = "qwen.qwen3_moe:qwen3_30b_a3b_pretrain_config"
GLM_AIR = "glm.h100.glm45:glm45_air_106b_pretrain_32gpu_h100_bf16_config"
SIZES = dict(
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
        dict(
            n_routed_experts=8,
            n_shared_experts=1,
            first_k_dense_replace=1,
            num_nextn_predict_layers=1,
        ),
    ),
}
# What makes a recipe small enough, and leaves out what needs a GPU; in fp32, in which sums of replicas agree with stock
# to 1e-5.
OVERRIDES = tuple(
    """
    model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=1 model.expert_model_parallel_size=2
    model.sequence_parallel=false model.seq_length=64 dataset.seq_length=64 dataset.num_workers=0
    +dataset.skip_getting_attention_mask_from_dataset=false tokenizer.tokenizer_type=NullTokenizer
    tokenizer.tokenizer_model=null tokenizer.vocab_size=500 tokenizer.hf_tokenizer_kwargs={}
    train.global_batch_size=8 train.micro_batch_size=2 train.train_iters=4 scheduler.lr_warmup_iters=1
    scheduler.lr_decay_iters=20 optimizer.lr=3e-3 optimizer.min_lr=1e-4 validation.eval_iters=0
    logger.log_interval=1 logger.tensorboard_dir=null checkpoint.save=null checkpoint.load=null
    dist.distributed_backend=gloo dist.use_gloo_process_groups=true model.transformer_impl=local
    model.moe_flex_dispatcher_backend=null model.moe_token_dispatcher_type=alltoall
    model.moe_permute_fusion=false model.gradient_accumulation_fusion=false model.apply_rope_fusion=false
    model.bias_dropout_fusion=false model.bias_activation_fusion=false model.masked_softmax_fusion=false
    model.persist_layer_norm=false model.cross_entropy_fusion_impl=native mixed_precision=null
    model.bf16=false optimizer.bf16=false optimizer.use_precision_aware_optimizer=false
    model.params_dtype=torch.float32 model.pipeline_dtype=torch.float32 model.autocast_dtype=torch.float32
    optimizer.params_dtype=torch.float32
    """.split()
)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of ``pretrain`` did: an entry an iteration, of losses by name and the gradient's norm; replicas."""

    steps: list[dict[str, float]]
    validation: list[dict[str, float]]
    replicas: Counter[str]

    def assert_same(self, other: Run, *, rel: float = 1e-5) -> None:
        assert len(self.steps) == len(other.steps), (
            f"{len(self.steps)} steps, not {len(other.steps)}"
        )
        for ours, theirs in zip(
            self.steps + self.validation, other.steps + other.validation, strict=True
        ):
            assert ours == pytest.approx(theirs, rel=rel, abs=0) if rel else ours == theirs


def train(config: Any, *more: Any) -> Run:
    """Run ``pretrain`` on this rank, with ``more`` callbacks."""
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils import checkpoint_utils

    from megatron_hecate import layer_metrics

    run = Run([], [], Counter())
    checkpoint_utils.read_train_state.cache_clear()  # a second load would find the state of the first run's end

    class Record(Callback):
        def on_train_step_end(self, context: Any) -> None:
            losses = {name: float(value) for name, value in context.loss_dict.items()}
            run.steps.append({**losses, "gradient": float(context.grad_norm)})
            run.replicas.update(
                {layer.layer: layer.replicas for layer in layer_metrics(context.model)}
            )

        def on_eval_end(self, context: Any) -> None:
            run.validation.append(
                {name: float(value) for name, value in context.total_loss_dict.items()}
            )

    pretrain(config, forward_step, callbacks=[Record(), *more])
    return run
