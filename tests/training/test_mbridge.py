"""A model that mbridge builds and wraps, where $HECATE_MBRIDGE names a checkout: as verl and AReaL build theirs.

mbridge's own classes read a configuration of Hugging Face, build the model, call ``post_model_creation_callbacks`` and
wrap it by Megatron's DDP. Layers are Megatron's local ones, because TransformerEngine needs a GPU. Oracle: the same
calls without FSSDP.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import ranks


def build(case: Any, hook: Callable | None) -> list:
    """Model chunks, wrapped by DDP."""
    import tiny_gpt
    from cpu_spec import for_cpu
    from transformers import Qwen3MoeConfig

    mbridge = importlib.import_module("mbridge")
    llm_bridge = importlib.import_module("mbridge.core.llm_bridge")
    specs = llm_bridge.get_gpt_decoder_block_spec

    def local_spec(
        config: Any, use_transformer_engine: bool = False, *, vp_stage: int | None = None
    ) -> Any:
        return for_cpu(specs(config, use_transformer_engine=False, vp_stage=vp_stage))

    hf_config = Qwen3MoeConfig(
        vocab_size=tiny_gpt.VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=48,
        num_experts=case.experts,
        num_experts_per_tok=2,
        max_position_embeddings=case.seq,
    )
    bridge = mbridge.AutoBridge.from_config(hf_config, dtype=torch.float32)
    bridge.set_extra_args(
        use_cpu_initialization=True,
        moe_grouped_gemm=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )

    def skew(chunk: Any, **_: Any) -> None:
        for layer in tiny_gpt.moe_layers([chunk]):
            tiny_gpt._skew(layer, case)

    torch.manual_seed(1234)
    with mock.patch.object(llm_bridge, "get_gpt_decoder_block_spec", local_spec):
        return bridge.get_model(
            wrap_with_ddp=True,
            bf16=False,
            ddp_config={"use_distributed_optimizer": case.distributed_optimizer},
            post_model_creation_callbacks=[skew] if hook is None else [skew, hook],
        )


@pytest.mark.newest
@pytest.mark.skipif("HECATE_MBRIDGE" not in os.environ, reason="no checkout of mbridge is named")
@pytest.mark.parametrize(
    "fields", [{}, dict(pp=2, vpp=2, accumulate=4, distributed_optimizer=True)], ids=["flat", "vpp"]
)
@ranks(4)
def test_a_model_that_it_builds(fields: dict) -> None:
    import tiny_gpt
    import torch.distributed as dist
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sys.path.insert(0, os.environ["HECATE_MBRIDGE"])
    case = tiny_gpt.Case(**fields)
    tiny_gpt.initialize(case)
    computed = torch.zeros(1)

    def train(hook: Callable | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        chunks = build(case, hook)
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
        return losses, {n: p.detach().clone() for n, p in tiny_gpt._named(chunks)}

    losses, params = train(None)
    ours, our_params = train(tiny_gpt.fssdp_hook(slots=2))
    dist.all_reduce(computed)
    assert computed > 0, "no replica computed anything, so nothing was tested"
    torch.testing.assert_close(ours, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(our_params, params, rtol=0, atol=1e-6)
