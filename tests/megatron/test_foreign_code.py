"""MoE layers with code of their own are refused by name; what only reads what they return is not.

Oracle: literal messages; for a router of its own, the model without FSSDP.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import tiny_gpt
from model_state import refusal
from ranks import ranks

# what the message names, its path in the layer, and the method
KINDS = (
    ("its experts", "experts", "forward"),
    ("its experts", "experts", "_pad_tensor_for_quantization"),
    ("a part of its experts", "experts.local_experts.0.linear_fc1", "forward"),
    ("its dispatcher", "token_dispatcher", "token_dispatch"),
    ("the layer", "", "forward"),
    ("the layer", "", "route"),
)


def of_own_kind(module: Any, method: str, *, name: str = "TurboExperts") -> type:
    """A subclass of another package, whose ``method`` does what it did."""
    base = type(module)

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(kind, self), method)(*args, **kwargs)

    own.__module__ = "turbo"
    kind = type(name, (base,), {method: own, "__module__": "turbo"})
    return kind


@ranks(2)
def test_own_code_is_refused_by_name() -> None:
    """In one layer, by a subclass; and patched into an object, or into Megatron's class."""
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    case = tiny_gpt.initialized()
    for subject, path, method in KINDS:
        chunks, _ = tiny_gpt.build(case)
        layer = tiny_gpt.moe_layers(chunks)[1]
        module = layer.token_dispatcher if path == "token_dispatcher" else layer.get_submodule(path)
        module.__class__ = of_own_kind(module, method)
        own = f"layer 2: {subject} (turbo.TurboExperts) has {method} of its own: FSSDP has replicas"
        assert f"{own} for Megatron's own code only; use " in refusal(chunks)
        assert not any(hasattr(m, "fssdp") for m in tiny_gpt.moe_layers(chunks))
    chunks, _ = tiny_gpt.build(case)
    experts = tiny_gpt.moe_layers(chunks)[0].experts
    experts.forward = lambda *args: SequentialMLP.forward(experts, *args)
    said = (
        "its experts (megatron.core.transformer.moe.experts.SequentialMLP) has forward of its own"
    )
    assert said in refusal(chunks)
    chunks, _ = tiny_gpt.build(case)

    def patched(
        self: Any, permuted_local_hidden_states: Any, tokens_per_expert: Any, permuted_probs: Any
    ) -> None: ...

    with mock.patch.object(SequentialMLP, "forward", patched):
        assert refusal(chunks).count("SequentialMLP) has forward of its own") == 1
    with mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", patched):
        assert refusal(chunks).count("MoEAlltoAllTokenDispatcher) has preprocess of its own") == 1


@ranks(2, preload="te")
def test_grouped_experts_of_their_own_are_refused() -> None:
    """And linears of these."""
    case = tiny_gpt.initialized(grouped=True)
    for path, method in {
        "": "forward",
        "linear_fc1": "forward",
        "linear_fc2": "_get_weight_tensors",
    }.items():
        chunks, _ = tiny_gpt.build(case)
        module = tiny_gpt.moe_layers(chunks)[0].experts.get_submodule(path)
        module.__class__ = of_own_kind(module, method)
        said = refusal(chunks)
        assert f"experts (turbo.TurboExperts) has {method} of its own: FSSDP" in said, said
    chunks, _ = tiny_gpt.build(case)
    experts = tiny_gpt.moe_layers(chunks)[0].experts
    experts.__class__ = of_own_kind(experts, "extra_repr")
    tiny_gpt.fssdp_hook()(chunks)


@ranks(2)
def test_a_layer_that_is_not_megatrons_is_named() -> None:
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    case = tiny_gpt.initialized()
    chunks, config = tiny_gpt.build(case)
    own = type("OwnMoE", (BaseMoELayer,), {"__module__": "turbo", "forward": lambda self: None})
    alien = own.__new__(own)
    super(BaseMoELayer, alien).__init__(config)
    chunks[0].add_module("beside", alien)
    said = "turbo.OwnMoE is a MoE layer of its own kind: FSSDP converts Megatron's MoELayer"
    assert said in refusal(chunks)


@ranks(2)
def test_a_router_of_its_own_trains_as_stock() -> None:
    """And a layer that adds to what Megatron's parts compute."""

    def own(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            layer.router.__class__ = of_own_kind(layer.router, "forward", name="OwnRouter")
            layer.__class__ = of_own_kind(layer, "postprocess", name="OwnLayer")
        return chunks

    case = tiny_gpt.initialized()
    stock = tiny_gpt.train(case, hook=own)
    ours = tiny_gpt.train(case, hook=lambda chunks: tiny_gpt.fssdp_hook()(own(chunks)))
    tiny_gpt.assert_trained_alike(stock, ours)


@ranks(2)
def test_a_router_that_returns_something_else_is_named() -> None:
    """Numbers of experts instead of a map over experts, as a fused router might."""
    case = tiny_gpt.initialized()
    chunks, config = tiny_gpt.build(case, tiny_gpt.fssdp_hook())
    for layer in tiny_gpt.moe_layers(chunks):
        routed = layer.router.forward
        layer.router.forward = lambda *args, routed=routed: (lambda p, m: (p, m.int()))(
            *routed(*args)
        )
    chunks, _ = tiny_gpt.wrap(case, chunks, config)
    with pytest.raises(
        ValueError, match=r"layer 1: TopKRouter returned a routing map of torch.int32 \[32, 8\], .*"
    ):
        tiny_gpt.run(case, chunks, 0, num_microbatches=1)
