"""A model that ROLL's mcore_adapter builds, where $HECATE_MCORE_ADAPTER names its checkout, its folder ``src``.

ROLL then wraps it, as here, after ``MegatronTrainStrategy.initialize`` of
``roll/distributed/strategy/megatron_strategy.py``, 8eb27cc2. mbridge builds the models of `test_verl_engine`. Layers are
Megatron's local ones, because TransformerEngine needs a GPU. Oracle: the same calls without FSSDP.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import tiny_gpt
import tiny_qwen3_moe
import torch
import torch.distributed as dist
from ranks import ranks


def local_spec(
    config: Any, use_transformer_engine: bool = False, *, vp_stage: int | None = None
) -> Any:
    """Megatron's ``get_gpt_decoder_block_spec`` for ranks without a GPU."""
    from cpu_spec import for_cpu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return for_cpu(
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    )


def build_by_mcore_adapter(case: Any, hook: Callable | None) -> list:
    """Model chunks, wrapped by DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    models = importlib.import_module("mcore_adapter.models.model_factory")
    template = importlib.import_module("mcore_adapter.models.converter.template")
    given = tiny_qwen3_moe.config_of(vocab=tiny_gpt.VOCAB, layers=case.layers)
    settings = template.get_template(given.model_type).convert_hf_to_mca_config_kws(given)
    settings |= dict(
        transformer_impl="local",
        use_cpu_initialization=True,
        expert_model_parallel_size=case.ep,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        variable_seq_lengths=False,
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
    )
    config = models.McaModelConfig(**settings)
    # Its hook on the logits returns them as they are, which autograd refuses in float32: Megatron's
    # cross entropy overwrites them there.
    patches = dict(
        get_gpt_decoder_block_spec=local_spec, mca_lora_logits_postprocess_hook=lambda *_: None
    )
    with mock.patch.multiple(models, **patches):
        model = models.VirtualModels(models.McaGPTModel, config)
    for layer in tiny_gpt.moe_layers(model.get_models()):
        tiny_gpt.add_skew(layer, case)
    if hook is not None:
        hook(model.get_models())
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=case.distributed_optimizer
    )
    return [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(model.get_models())
    ]


LAYOUT = dict(pp=2, vpp=2, accumulate=4, distributed_optimizer=True)


@pytest.mark.newest
@pytest.mark.skipif("HECATE_MCORE_ADAPTER" not in os.environ, reason="no checkout is named")
@ranks(4, timeout=300)
def test_a_model_that_roll_builds() -> None:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sys.path.insert(0, os.environ["HECATE_MCORE_ADAPTER"])
    case = tiny_gpt.initialized(**LAYOUT)
    computed = torch.zeros(1)

    def train(hook: Callable | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(1234)
        chunks = build_by_mcore_adapter(case, hook)
        if hook is not None:
            tiny_gpt.counting_hook(lambda converted: converted, computed)(chunks)
        config = chunks[0].module.config
        config.finalize_model_grads_func = finalize_model_grads
        settings = OptimizerConfig(
            optimizer="adam", lr=3e-3, use_distributed_optimizer=case.distributed_optimizer
        )
        optimizer = get_megatron_optimizer(settings, chunks)
        losses = []
        for step in range(3):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            loss = tiny_gpt.run(case, chunks, step, num_microbatches=case.accumulate)
            assert optimizer.step()[0]
            losses.append(loss)
        return losses, {n: p.detach().clone() for n, p in tiny_gpt.named_parameters(chunks)}

    losses, params = train(None)
    ours, our_params = train(tiny_gpt.fssdp_hook(slots=2))
    dist.all_reduce(computed)
    assert computed > 0, "no replica computed anything, so nothing was tested"
    torch.testing.assert_close(ours, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(our_params, params, rtol=0, atol=1e-6)
