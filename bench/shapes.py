"""Sizes of experts, for benchmarks."""

from __future__ import annotations

from megatron_hecate.plan import LayerShape


def swiglu(
    hidden: int, ffn: int, *, microbatches: int = 1, hidden_seconds: float = 0.0
) -> LayerShape:
    """Describe a gated expert of three ``hidden x ffn`` matrices in bf16, with fp32 gradients.

    Args:
        hidden: size of a token.
        ffn: intermediate size of the expert.
        microbatches: microbatches per iteration.
        hidden_seconds: compute before the layer, under which a fetch is hidden.
    """
    elements = 3 * hidden * ffn
    return LayerShape(
        expert_bytes=2 * elements,
        grad_bytes=4 * elements,
        token_bytes=2 * hidden,
        token_flops=2.0 * elements,
        microbatches=microbatches,
        hidden_seconds=hidden_seconds,
    )
