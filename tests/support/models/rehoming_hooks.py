"""FSSDP whose homes move as a test wants, and what lies where afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import moved_homes
import tiny_gpt
import torch
import torch.distributed as dist


def hashes(run: Any) -> dict[str, str]:
    """Of every parameter of the job, and of moments, under the expert's own number. Experts of this rank are whole, so
    that a shard of the distributed optimizer begins where its parameter does."""
    numbers = {}
    for layer in tiny_gpt.moe_layers(run.chunks):
        rank, count = (
            tiny_gpt.parallel_state.get_expert_model_parallel_rank(),
            layer.num_local_experts,
        )
        places = range(rank * count, (rank + 1) * count)
        if hasattr(layer, "fssdp"):
            places = layer.fssdp.homes.table[rank, :count].tolist()
        for i, expert in enumerate(layer.experts.local_experts):
            numbers |= {id(p): (i, places[i]) for p in expert.parameters()}
    states = {}
    for optimizer in run.optimizer.chained_optimizers:
        states |= {
            stepped.data_ptr(): state for stepped, state in optimizer.optimizer.state.items()
        }
    own = {}
    for name, p in run.chunks[0].module.named_parameters():
        if id(p) in numbers:
            place, expert = numbers[id(p)]
            name = name.replace(f"local_experts.{place}.", f"expert {expert} ")
        own[name] = p.detach()
        for kind, value in states.get(getattr(p, "main_param", p).data_ptr(), {}).items():
            if torch.is_tensor(value) and value.dim():
                own[f"{name} {kind}"] = value
    of_ranks: list[Any] = [None] * dist.get_world_size()
    mine = {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        for name, value in own.items()
    }
    dist.all_gather_object(of_ranks, mine)
    return {name: value for of_rank in of_ranks for name, value in of_rank.items()}


def homes_of(run: Any) -> Any:
    return tiny_gpt.moe_layers(run.chunks)[0].prefetcher.rehoming.homes


def rehoming_hook(
    orders: Callable = moved_homes.wanted_at, **settings: Any
) -> Callable[[list], list]:
    """FSSDP that looks for homes at every iteration, and finds those that ``orders`` gives."""
    moved_homes.find(orders)
    return tiny_gpt.fssdp_hook(**{"rehome": 3, **settings})
