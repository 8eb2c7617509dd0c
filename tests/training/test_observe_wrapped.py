"""Observe only, where Megatron wraps or captures what it trains, and where iterations end.

Oracle: stock Megatron with the same settings, bit for bit; the maps that dispatchers are given, counted beside the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
import types
from typing import Any

import graphs_on_cpu
import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from layouts import FULL
from quick import quick
from ranks import ranks
from routed_tokens import RoutedTokens, recorded_run

from megatron_hecate import HecateConfig, fssdp

# by whose graphs, and scopes of TransformerEngine's
GRAPHS: dict[str, tuple[str, ...]] = {
    "router": ("attn", "moe_router"),
    "experts": ("moe",),
    "layer": (),
    "layer, local": (),
    "whole iteration": (),
}


@pytest.mark.newest
@pytest.mark.parametrize("graphs", quick(GRAPHS, ["layer"]))
@ranks(2, preload="te")
def test_graphs_hold_the_counting(graphs: str) -> None:
    """Those of experts, layers and whole iterations are refused by FSSDP. Oracle: the same model observed without
    graphs."""
    settings, fields = {}, {}
    if graphs != "router":  # where nothing waits for the host: every expert takes as many tokens
        settings = dict(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
        fields = dict(experts=2, bf16=True)
    case = tiny_gpt.initialized(accumulate=2, settings=settings, **fields)
    loads = []

    def observed(case: Any, train: Any) -> Any:
        folder = f"{os.environ['TEST_FOLDER']}/{len(loads)}"
        trained = train(case, steps=5, hook=fssdp(HecateConfig(observe=True, record=folder)))
        loads.append(recorded_run(trained.chunks, folder).load.tolist())
        return trained

    eager = observed(case, tiny_gpt.train)
    graphs_on_cpu.install()
    train = tiny_gpt.train
    if graphs == "whole iteration":
        graphs_on_cpu.whole_iterations()
        graphed = dataclasses.replace(case, settings=graphs_on_cpu.full_iteration(**settings))
    elif graphs == "layer, local":
        graphed = dataclasses.replace(case, settings=graphs_on_cpu.local(**settings))
    else:
        of_scopes = graphs_on_cpu.transformer_engine(*GRAPHS[graphs], **settings)
        graphed, train = dataclasses.replace(case, settings=of_scopes), graphs_on_cpu.train
    ours = observed(graphed, train)
    graphs_on_cpu.assert_replayed(at_least=1)
    assert tiny_gpt.difference(eager, ours) == tiny_gpt.SAME
    assert len(loads[0]) == 5 and loads[0] == loads[1]


def _captured(step: Any) -> Any:
    """``step`` in a graph of its own, captured at the first call."""
    graph, results = torch.cuda.CUDAGraph(), []

    def replay() -> Any:
        if not results:
            with torch.cuda.graph(graph):
                results.append(step())
        graph.replay()
        return results[0]

    return replay


@pytest.mark.newest
@ranks(2)
def test_a_graph_of_the_optimizers_step() -> None:
    """Nothing of ours is captured (``--optimizer-cuda-graph``), and nothing is recorded after it. Oracle: stock Megatron;
    counts of the same run without."""
    from megatron_hecate.record import observe

    def train(case: Any, *, graph: bool, hook: Any = None) -> Any:
        run = tiny_gpt.train(case, steps=1, hook=hook, before_step=tiny_gpt.move_skew)
        # Megatron's, without TransformerEngine's kernels, waits for it.
        run.optimizer.get_grad_norm = lambda: 0.0
        if graph:
            observe.device_of_rank = lambda: torch.device("cuda")
            run.optimizer.step = _captured(run.optimizer.step)
        for step in range(1, 5):
            run.step(step)
        run.read_params()
        return run

    def observed(folder: str, *, graph: bool) -> Any:
        path = f"{os.environ['TEST_FOLDER']}/{folder}"
        run = train(case, graph=graph, hook=fssdp(HecateConfig(observe=True, record=path)))
        return run, recorded_run(run.chunks, path)

    graphs_on_cpu.install()
    case = tiny_gpt.initialized(
        accumulate=2, optimizer=(("optimizer", "sgd"), ("lr", 0.1), ("clip_grad", 0.0))
    )
    stock = train(case, graph=False)
    _, eager = observed("eager", graph=False)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        ours, graphed = observed("graphed", graph=True)
    graphs_on_cpu.assert_replayed(at_least=1)
    assert tiny_gpt.difference(stock, ours) == tiny_gpt.SAME
    assert eager.iteration.tolist() == [1, 2, 3, 4, 5]
    assert len({str(load) for load in eager.load.tolist()}) == 5
    assert graphed.load.tolist() == eager.load.tolist()[:1] and graphed.iteration.tolist() == [1]
    assert "FSSDP stops observing" in said.getvalue()


class _Descent:
    """An optimizer that is none of torch's, behind the names that the training loop calls."""

    def __init__(self, chunks: list) -> None:
        self.params = [p for chunk in chunks for p in chunk.parameters()]

    def step(self) -> tuple[bool, float, None]:
        for p in self.params:
            p.data.add_(p.main_grad, alpha=-0.1)
        return True, 0.0, None


@ranks(2)
def test_an_optimizer_that_is_none_of_torchs() -> None:
    """Megatron's arguments number iterations: their end is told by the next one's first forward. Oracle: the
    dispatchers' maps, counted beside the run."""
    case = tiny_gpt.initialized(accumulate=2, settings=FULL)
    arguments = types.SimpleNamespace(curr_iteration=0)
    routed = RoutedTokens(os.environ["TEST_FOLDER"] + "/run")
    nobody = dict.fromkeys(("get_tensorboard_writer", "get_wandb_writer"), lambda: None)
    sys.modules["megatron.training.global_vars"] = types.SimpleNamespace(
        _GLOBAL_ARGS=arguments, **nobody
    )
    run = tiny_gpt.train(case, steps=0, hook=routed)
    run.optimizer.step = _Descent(run.chunks).step
    for step in range(11):
        arguments.curr_iteration = step
        run.step(step)
        routed.end_step()
    loads, record = routed.loads(10).sum(dim=2), recorded_run(run.chunks, routed.folder)
    assert record.iteration.tolist() == list(range(1, 11))
    assert record.load.tolist() == loads.tolist()


SHARDED = {"optim_grads_params": dict(ep=1), "optim_grads": {}, "optim": dict(tp=2, etp=1)}


@pytest.mark.newest
@pytest.mark.parametrize("sharded", quick(SHARDED, ["optim_grads_params"]))
@ranks(2)
def test_megatron_fsdp(sharded: str) -> None:
    """``--use-megatron-fsdp``, by Megatron's own wrapper, which runs on CPU ranks without a fused scaling of NCCL's."""
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    case = tiny_gpt.initialized(accumulate=2, distributed_optimizer=True, **SHARDED[sharded])
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=sharded,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=sharded == "optim_grads_params",
        grad_reduce_in_fp32=True,
        gradient_reduce_div_fusion=False,
    )

    def train(routed: RoutedTokens | None) -> tuple[list, list, dict[str, str | None], list]:
        """Losses and norms of three steps, this rank's parameters, how Megatron-FSDP takes them to be split; the model
        that it wraps."""
        chunks, config = tiny_gpt.build(case, routed)
        torch.cuda.current_device = lambda: 0
        wrapped = FullyShardedDataParallel(config, ddp, chunks[0], device=torch.device("cpu"))
        torch.cuda.current_device = lambda: torch.device("cpu")
        named = chunks[0].named_parameters()
        split = {name: getattr(p, "_tensor_parallel_mode", None) for name, p in named}
        config.no_sync_func = wrapped.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        settings = OptimizerConfig(optimizer="adam", lr=3e-3, use_distributed_optimizer=True)
        optimizer, seen = get_megatron_optimizer(settings, [wrapped]), []
        config.grad_scale_func = optimizer.scale_loss
        for step in range(3):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            seen.append(tiny_gpt.run(case, [wrapped], step, num_microbatches=2))
            if routed:
                routed.end_step()
            seen += optimizer.step()[:2]
        shards = [getattr(p, "_local_tensor", p) for p in optimizer.get_parameters()]
        params = [shard.detach().clone() for shard in shards]
        return seen, params, split, chunks

    stock = train(None)
    routed = RoutedTokens(os.environ["TEST_FOLDER"] + "/run")
    seen, params, split, chunks = train(routed)
    assert seen == stock[0] and split == stock[2]
    assert len(params) == len(stock[1]) > 0 and all(map(torch.equal, params, stock[1]))
    loads, record = routed.loads(3).sum(dim=2), recorded_run(chunks, routed.folder)
    assert dist.get_rank() or (record.load.tolist() == loads.tolist() and record.load.sum() > 0)
