"""Qwen3-MoE as Hugging Face writes it, made small, with random weights and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def config_of(*, vocab: int, layers: int) -> Any:
    """Make the model's configuration."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )


def write(folder: Path, *, skew: float = 0.0) -> None:
    """Write configuration, weights and tokenizer.

    Args:
        folder: where a checkpoint of Hugging Face will be.
        skew: weight of the experts that most tokens choose, other ones in every layer; 0 for none.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = dict(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<|im_start|>"], **special
    ).save_pretrained(folder)
    torch.manual_seed(1)
    config = config_of(vocab=260, layers=4)
    model = Qwen3MoeForCausalLM(config)
    if skew:
        # the first feature is large in all tokens, and hot experts look at it; weights are large
        # enough for each expert to matter
        with torch.no_grad():
            embedding = model.model.embed_tokens.weight
            for weight in filter(lambda p: p.dim() > 1, model.parameters()):
                weight.mul_(5)
            embedding.mul_(3)[:, 0] += 1
            for index, layer in enumerate(model.model.layers):
                hot = 5 * index % config.num_experts
                layer.mlp.gate.weight[hot, 0] += skew
                layer.mlp.gate.weight[(hot + 1) % config.num_experts, 0] += skew / 2
    model.save_pretrained(folder)
