"""Observe only: Megatron trains as ever, and the record holds what it routed.

Oracle: stock Megatron, bit for bit; the routing maps its dispatcher is given, counted in plain Python beside the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_gpt
import torch
import torch.distributed as dist
import variants
from layout_tables import LAYOUTS
from layouts import MOE
from quick import quick
from ranks import ranks
from routed_tokens import RoutedTokens, recorded_run

import megatron_hecate
from megatron_hecate.comm.transport import ALIGNMENT
from megatron_hecate.replicas.memory_estimate import RankMemory
from megatron_hecate.tools.job_settings import JobSettings
from megatron_hecate.tools.run import Run
from megatron_hecate.tools.what_if import make_parser

# layouts that are observed, and one without expert parallelism, which FSSDP refuses
LAYOUT_NAMES = """ep2 distopt-overlap recompute-full recompute-moe group-limited-topk-global-aux-loss
    sinkhorn expert-bias top3-seq-aux-loss capacity capacity-padded allgather tp2-etp1
    ep-comm-overlap one-expert""".split()
BF16_MAIN_GRADS = "tensors-bf16-main-grads"
QUICK = "alone ep2 distopt-overlap recompute-full expert-bias capacity-padded tp2-etp1".split()


def _check_simulated(folder: str, layers: list) -> None:
    """The record is enough to simulate the job: its settings are those of the model that trained."""
    run = Run.read(folder)
    settings = JobSettings.resolve(make_parser("").parse_args([folder]), run)
    config, model, experts = layers[0].config, settings.model, layers[0].experts
    params = sum(p.numel() for p in experts.parameters()) / experts.num_local_experts
    assert abs(model.expert_elements / params - 1) < 0.01
    assert (model.layers, model.experts) == (len(layers), config.num_moe_experts)
    assert (model.top_k, model.hidden) == (config.moe_router_topk, config.hidden_size)
    assert (settings.ranks, settings.ep, settings.pp) == (2, run.info.ranks, 1)
    assert settings.step_ms == run.stock_step_ms > 0 and not settings.notes
    # Every token of a microbatch is routed to k experts, unless some are dropped.
    if config.moe_expert_capacity_factor is None:
        pairs = settings.tokens * settings.microbatches * run.info.ranks * model.top_k
        assert pairs == run.record.load[0, 0].sum()


def _largest_over_mean(of_ranks: torch.Tensor, *, microbatches: int) -> np.ndarray:
    """[T, L] the largest of the ratios of microbatches, of tokens by rank, the last axis; 0 without tokens."""
    ratios = of_ranks.amax(dim=-1) / of_ranks.double().mean(dim=-1).clamp(min=1e-9)
    return ratios.amax(dim=microbatches).numpy()


@pytest.mark.parametrize("name", quick(["alone", *LAYOUT_NAMES], QUICK))
@ranks(2)
def test_training_is_stock_bit_for_bit_and_what_it_routed_is_recorded(name: str) -> None:
    if name == "alone":
        case = tiny_gpt.initialized(ep=1)
        with pytest.raises(ValueError, match="FSSDP cannot be switched on"):
            tiny_gpt.build(case, tiny_gpt.fssdp_hook())
    else:
        case, _ = variants.case_of(LAYOUTS[name])
    stock = tiny_gpt.train(case)
    routed = RoutedTokens(os.environ["TEST_FOLDER"] + "/run")
    observed = tiny_gpt.train(case, hook=routed, before_step=routed.end_step)
    assert tiny_gpt.difference(stock, observed) == tiny_gpt.SAME
    assert observed.grad_norms == stock.grad_norms
    observed.evaluate(7)  # which must not be counted
    layers = tiny_gpt.moe_layers(observed.chunks)
    assert not layers[0].router.observer.counts.take().any(), "evaluation was counted"
    loads, record = routed.loads(3), recorded_run(observed.chunks, routed.folder)
    info = record.info
    assert (info.mode, info.ranks, info.num_experts) == ("observe", case.ep, 8)
    assert info.layers == tuple(f"layer {layer.layer_number}" for layer in layers)
    assert record.iteration.tolist() == [1, 2, 3]
    if case.ep > 1 or dist.get_rank() == 0:
        assert record.load.tolist() == loads.sum(dim=2).tolist()
        # Brute force over forwards: the fullest rank of each.
        of_ranks = loads.unflatten(3, (case.ep, -1)).sum(dim=4)
        assert record.peak.tolist() == of_ranks.amax(dim=3).sum(dim=2).tolist()
        assert np.allclose(record.stock_factor, _largest_over_mean(of_ranks, microbatches=2))
    assert record.load.sum() > 0
    if dist.get_rank() == 0:
        job = info.job
        assert (job["ranks"], job["pp"], job["hidden"]) == (2, 1, layers[0].config.hidden_size)
        assert job["dispatcher"] == layers[0].config.moe_token_dispatcher_type
        _check_simulated(routed.folder, layers)


@pytest.mark.newest
@pytest.mark.parametrize("in_fp32", [False, True], ids=["bf16", "fp32"])
@ranks(2, preload=LAYOUTS[BF16_MAIN_GRADS].packages)
def test_gradients_of_replicas_have_the_type_of_main_gradients(in_fp32: bool) -> None:
    """Their memory, their price and records, where GEMMs are fused. Oracle: sizes of main gradients, which DDP has
    allocated."""
    case, prepare = variants.case_of(LAYOUTS[BF16_MAIN_GRADS])
    case = dataclasses.replace(case, grad_reduce_in_fp32=in_fp32)
    for kind in ("observed", "fssdp"):
        folder = f"{os.environ['TEST_FOLDER']}/{kind}"
        settings = dict(observe=True) if kind == "observed" else {}
        hook = tiny_gpt.fssdp_hook(record=folder, **settings)
        run = tiny_gpt.train(case, hook=lambda chunks, hook=hook: hook(prepare(chunks)))
        layers = tiny_gpt.moe_layers(run.chunks)
        homes = list(layers[0].experts.parameters())
        grads = sum(p.main_grad.nbytes for p in homes) // layers[0].num_local_experts
        assert {p.main_grad.itemsize for p in homes} == {4 if in_fp32 else 2}
        info = recorded_run(run.chunks, folder).info
        assert info.shape["grad_bytes"] == grads, kind
        if dist.get_rank() == 0:
            assert Run.read(folder).model.shape().grad_bytes == pytest.approx(grads, rel=0.01)
    states = [layer.fssdp for layer in layers]
    assert run.replicas and {state.shape(2).grad_bytes for state in states} == {grads}
    weights = sum(p.nbytes for p in homes) // layers[0].num_local_experts
    padded = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in (weights, grads))
    staged = states[0].transport.extra_bytes(states[0].slots.pool.layers)
    needed = len(layers) * 2 * padded + staged
    assert megatron_hecate.release(run.chunks) == needed
    # memory in which the replicas just fit, beside gradients of the homes in the weights' type
    needed += 4 * weights * len(layers) + 1024
    RankMemory.free_memory = staticmethod(lambda *, gpu: needed)
    arguments = SimpleNamespace(accumulate_allreduce_grads_in_fp32=in_fp32)
    sys.modules["megatron.training.global_vars"] = SimpleNamespace(_GLOBAL_ARGS=arguments)
    assert tiny_gpt.build(case, lambda chunks: tiny_gpt.fssdp_hook()(prepare(chunks)))
    arguments.accumulate_allreduce_grads_in_fp32 = True
    with contextlib.nullcontext() if in_fp32 else pytest.raises(ValueError, match="for replicas"):
        tiny_gpt.build(case, lambda chunks: tiny_gpt.fssdp_hook()(prepare(chunks)))


SETTINGS: dict[str, dict[str, Any]] = {
    "iteration": {},
    "late": dict(late_replicas=4, lifetime="layer"),
    "no slots": dict(slots=0),
    "recomputed": dict(lifetime="layer"),
}


@pytest.mark.parametrize("name", quick(SETTINGS, ["iteration", "late"]))
@ranks(4)
def test_a_run_with_fssdp_records_what_its_layers_did(name: str) -> None:
    """Two machines, by name. Oracle: tokens that each rank's experts are given; where every token starts and is
    computed, from the maps over physical experts; placements read when the optimizer steps."""
    settings, rank = SETTINGS[name], dist.get_rank()
    folder = os.environ["TEST_FOLDER"] + "/run"
    socket.gethostname = lambda: f"machine {rank // 2}"
    recomputed = MOE if "lifetime" in settings else {}
    case = tiny_gpt.initialized(ep=4, accumulate=2, skew=3, settings=recomputed)
    hook = tiny_gpt.fssdp_hook(record=folder, **settings)
    # by microbatch and layer: tokens by rank, by expert, crossing
    seen: list = [torch.zeros(2, 2, 4 + 8 + 1, dtype=torch.int64)]
    dispatched = [0, 0]  # microbatches of each layer in this iteration
    placed: list = []

    def watch(chunks: list) -> list:
        chunks = hook(chunks)
        # other hot experts in each microbatch
        chunks[0].register_forward_pre_hook(lambda *_: tiny_gpt.move_skew(chunks, 0))
        for i, layer in enumerate(tiny_gpt.moe_layers(chunks)):
            layer.experts.register_forward_pre_hook(lambda _, args, i=i: computed(i, len(args[0])))
            for dispatcher in {layer.fssdp.stock_dispatcher, layer.fssdp.physical_dispatcher}:
                is_stock = dispatcher is not layer.fssdp.physical_dispatcher
                dispatcher.dispatch_preprocess = functools.partial(
                    sent, i, dispatcher.dispatch_preprocess, layer.fssdp, is_stock
                )
        return chunks

    def computed(i: int, tokens: int) -> None:
        if torch._C._current_graph_task_id() == -1:
            seen[-1][dispatched[i] - 1, i, rank] += tokens

    def sent(i: int, original: Any, state: Any, is_stock: bool, *args: Any) -> Any:
        _, routing_map, *_ = args
        if torch._C._current_graph_task_id() == -1:
            table = state.parts.homes_only.table[:, :2] if is_stock else state.placement.table
            counts = seen[-1][dispatched[i], i]
            dispatched[i] += 1
            for physical, tokens in enumerate(routing_map.sum(dim=0).tolist()):
                holder, slot = divmod(physical, table.shape[1])
                if tokens:
                    counts[4 + table[holder, slot]] += tokens
                if holder // 2 != rank // 2:
                    counts[12] += tokens
        return original(*args)

    def before_step(chunks: list, _: int) -> None:
        placed.append(
            [(la.fssdp.current.planned, la.fssdp.placement) for la in tiny_gpt.moe_layers(chunks)]
        )
        seen.append(torch.zeros_like(seen[0]))
        dispatched[:] = [0, 0]

    run = tiny_gpt.train(case, hook=watch, before_step=before_step, steps=4)
    of_microbatches = torch.stack(seen[:4])
    dist.all_reduce(of_microbatches)
    total = of_microbatches.sum(dim=1)
    record, slots = recorded_run(run.chunks, folder), settings.get("slots", 2)
    info = record.info
    assert (info.mode, info.node, info.slots) == ("fssdp", (0, 0, 1, 1), slots)
    assert record.iteration.tolist() == [1, 2, 3, 4]
    assert record.rank_load.tolist() == total[:, :, :4].tolist()
    assert record.load.tolist() == total[:, :, 4:12].tolist()
    assert record.crossing.tolist() == total[:, :, 12].tolist()
    routed = of_microbatches[..., 4:12].unflatten(3, (4, 2)).sum(dim=4)
    assert record.peak.tolist() == routed.amax(dim=3).sum(dim=1).tolist()
    fullest = of_microbatches[..., :4].amax(dim=3).sum(dim=1)
    assert record.computed_peak.tolist() == fullest.tolist()
    computed_factor = _largest_over_mean(of_microbatches[..., :4], microbatches=1)
    # Quotas note it rounded up.
    assert np.allclose(record.factor, computed_factor, rtol=0, atol=2e-5)
    stock_factor = _largest_over_mean(routed, microbatches=1)
    assert np.allclose(record.stock_factor, stock_factor, rtol=0, atol=2e-5)
    assert (record.factor[1:] < record.stock_factor[1:]).any() == bool(slots)
    of_iteration = total[:, :, 4:12].unflatten(2, (4, 2)).sum(dim=3).amax(dim=2)
    assert (record.peak > of_iteration.numpy()).any()
    for t, layers in enumerate(placed):
        for at, (planned, now) in enumerate(layers):
            slots_of = enumerate(record.replica[t, at].tolist())
            recorded = {(e, n) for n, experts in slots_of for e in experts if e >= 0}
            held = {(e, n) for e, n in np.argwhere(now.holders).tolist() if n != e // 2}
            assert recorded == held
            late = held - set(map(tuple, np.argwhere(planned.holders).tolist()))
            assert record.late[t, at] == len(late)
    assert (record.replica >= 0).any() == bool(slots)
    if settings.get("late_replicas"):
        assert record.late.any()
