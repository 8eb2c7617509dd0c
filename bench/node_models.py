"""Models of `node`: stock Megatron or FSSDP, on GPUs or rehearsed on CPUs, on drawn routes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

FREE = str(Path(__file__).resolve().parent.parent / "tests" / "data" / "free_copies.json")
# settings of FSSDP by the kind of a way of training, "TRANSPORT" or "TRANSPORT:KIND"
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "layer": dict(lifetime="layer"),
    "late": dict(late_replicas=8),
    "one": dict(slots=1),
    "free": dict(speeds=FREE),
}
TRANSPORTS = ("nvlink", "p2p")
SLOTS: int = 2
SCOPES = ("attn", "moe_router", "moe_preprocess")
# gradient buckets, elements
BUCKET: int = 40_000_000


def start() -> None:
    """Start the process group on this rank, on a GPU or on CPUs."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        from host import start_on_cpu

        start_on_cpu()
        return
    from node_machine import ThreadBlocks

    ranks = int(os.environ["WORLD_SIZE"])
    check_shares(ranks)
    ThreadBlocks.of(ranks).use()
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120))


def check_shares(ranks: int) -> None:
    """Check that MPS gives each rank multiprocessors of its own.

    Raises:
        ValueError: it does not; times would mean nothing.
    """
    import torch

    from megatron_hecate.nvlink.launch import MULTIPROCESSORS

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    share = properties.multi_processor_count
    per_gpu = ranks // torch.cuda.device_count()
    if per_gpu * share > 1.5 * MULTIPROCESSORS.get(properties.major, share):
        raise ValueError(
            f"each of {per_gpu} ranks of the GPU has {share} multiprocessors: they take turns, and "
            "times mean nothing; start MPS (nvidia-cuda-mps-control -d)"
        )


def batches(batch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``batch`` with results that are kept, those of step 0 for all steps."""
    kept: dict[tuple[int, int], Any] = {}

    def cached(case: Any, step: int, index: int) -> Any:
        key = (case.seq, index)
        if key not in kept:
            kept[key] = batch(case, 0, index)
        return kept[key]

    return cached


def make_case(shape: Any, arguments: argparse.Namespace, ranks: int) -> Any:
    """Describe the model of ``shape`` (`node_scale.Shape`) for `tiny_gpt`."""
    import tiny_gpt
    from node_machine import HEAD

    head = HEAD if not arguments.tiny else 16
    settings: dict[str, Any] = dict(
        num_layers=arguments.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        moe_ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=head,
        moe_router_topk=shape.top_k,
        gradient_accumulation_fusion=True,
    )
    if not arguments.tiny:
        settings |= dict(moe_permute_fusion=True, bias_activation_fusion=True)
    if arguments.graphs:
        settings |= dict(
            cuda_graph_impl="transformer_engine",
            cuda_graph_modules=list(SCOPES),
            cuda_graph_warmup_steps=arguments.warmup,
        )
    return tiny_gpt.Case(
        ep=ranks,
        grouped=True,
        seq=shape.tokens // shape.sequences,
        micro_batch=shape.sequences,
        accumulate=arguments.microbatches,
        bf16=True,
        distributed_optimizer=True,
        overlap=True,
        bucket_size=BUCKET,
        experts=shape.experts,
        skew=0.0,
        settings=tuple(settings.items()),
        # Weights hardly change, so that routes do not.
        optimizer=(("lr", 1e-7), ("weight_decay", 0.0)),
    )


class Model:
    """One trained model, by one way.

    Args:
        case: a `tiny_gpt.Case`.
        way: way of training; "stock" converts nothing.
        settings: settings of FSSDP for all ways, such as speeds.
    """

    def __init__(self, case: Any, way: str, settings: dict[str, Any]) -> None:
        import tiny_gpt
        import torch.distributed as dist
        from node_routes import LayerRoutes

        from megatron_hecate import HecateConfig, fssdp

        self.case = case
        hook = None
        if way != "stock":
            transport, _, kind = way.partition(":")
            of_way = {"slots": SLOTS, "transport": transport, **KINDS[kind]}
            hook = fssdp(HecateConfig(**{**settings, **of_way}))
        self.trained = tiny_gpt.train(case, steps=0, hook=hook)
        # Copies of all parameters, for comparisons.
        self.trained.params.clear()
        layers = tiny_gpt.moe_layers(self.trained.chunks)
        self.routes = [
            LayerRoutes(layer.router, index, rank=dist.get_rank())
            for index, layer in enumerate(layers)
        ]

    def compute(self, case: Any, step: int) -> None:
        """Run the forwards and backwards of one step."""
        import tiny_gpt

        for chunk in self.trained.chunks:
            chunk.zero_grad_buffer()
        self.trained.optimizer.zero_grad()
        tiny_gpt.run(case, self.trained.chunks, step, num_microbatches=case.accumulate)

    def capture(self) -> None:
        """Capture Megatron's CUDA graphs, as ``megatron.training`` does after its warmup."""
        import tiny_gpt
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        chunks, case = self.trained.chunks, self.case
        config = tiny_gpt.moe_layers(chunks)[0].config
        optimizers = [self.trained.optimizer]
        helper = TECudaGraphHelper(chunks, config, case.seq, case.micro_batch, optimizers)
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
        helper.create_cudagraphs()
        for chunk in chunks:
            chunk.enable_forward_pre_hook()
        helper.cuda_graph_set_manual_hooks()
