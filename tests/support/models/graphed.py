"""What CUDA graphs of a model hold, and what must stay outside."""

from __future__ import annotations

SCOPES = ("attn", "moe_router", "moe_preprocess")


def declare() -> None:
    """What must run for every microbatch, and so never inside a graph."""
    from graph_capture import not_in_graphs

    from megatron_hecate.step.prefetch import Prefetcher

    for name in ("before_attention", "materialize", "dispatched", "begin_chunk", "add_late"):
        not_in_graphs(Prefetcher, name)
