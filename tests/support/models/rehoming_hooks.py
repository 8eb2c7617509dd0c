"""Homes that move as a test wants, whatever the loads are, and what lies where afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist

from megatron_hecate.homes.exchange import Relocation
from megatron_hecate.homes.planner import Choice, HomeAssignment, HomeSearch

received_bytes = 0  # by this process, in all moves


class _Counted(Relocation):
    def exchange(self) -> None:
        global received_bytes
        super().exchange()
        received_bytes += self._received.nbytes


def wanted_at(look: int, num_experts: int) -> np.ndarray:
    """[E] the order of homes from a look on: another one each time, in which experts of all ranks change places."""
    return np.random.default_rng(look).permutation(num_experts)


def find(orders: Callable[[int, int], np.ndarray] = wanted_at) -> None:
    """From here on each look of this process finds what ``orders`` gives, for 100 times the layer plus the look."""
    from megatron_hecate.homes import mover, schedule  # imports Megatron

    looks = 0

    class Wanted(HomeSearch):
        def choose(
            self, load: np.ndarray, order: np.ndarray, layers: Iterable[int]
        ) -> list[Choice]:
            nonlocal looks
            looks += 1
            assert load.sum() > 0
            size = order.shape[1]
            return [Choice(layer, orders(looks + 100 * layer, size), 1.0) for layer in layers]

        def afford(self, choices: Iterable[Choice], order: np.ndarray) -> HomeAssignment:
            found = {choice.layer: choice.order for choice in choices}
            every = np.stack([found[i] for i in range(len(order))])
            return HomeAssignment(order=every, num_bytes=1.0, saved=1.0)

    schedule.HomeSearch = Wanted
    mover.Relocation = _Counted


def hashes(run: Any) -> dict[str, str]:
    """Of every parameter of the job, and of moments, under the expert's own number. Experts of this rank are whole, so
    that a shard of the distributed optimizer begins where its parameter does."""
    numbers = {}
    for layer in tiny_gpt.moe_layers(run.chunks):
        rank = tiny_gpt.parallel_state.get_expert_model_parallel_rank()
        count = layer.num_local_experts
        places = range(rank * count, (rank + 1) * count)
        if hasattr(layer, "fssdp"):
            places = layer.fssdp.homes.table[rank, :count].tolist()
        for i, expert in enumerate(layer.experts.local_experts):
            numbers |= {id(p): (i, places[i]) for p in expert.parameters()}
    states = {}
    for optimizer in run.optimizer.chained_optimizers:
        kept = optimizer.optimizer.state.items()
        states |= {stepped.data_ptr(): state for stepped, state in kept}
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
    held = {name: value.contiguous().numpy().tobytes() for name, value in own.items()}
    mine = {name: hashlib.sha256(data).hexdigest() for name, data in held.items()}
    dist.all_gather_object(of_ranks, mine)
    return {name: value for of_rank in of_ranks for name, value in of_rank.items()}


def homes_of(run: Any) -> Any:
    return tiny_gpt.moe_layers(run.chunks)[0].prefetcher.rehoming.homes


def are_moved(chunks: list) -> bool:
    """Whether experts of a model, which may be stock's, are elsewhere."""
    layer = tiny_gpt.moe_layers(chunks)[0]
    rehoming = hasattr(layer, "fssdp") and layer.prefetcher.rehoming
    return bool(rehoming and rehoming.homes.are_moved)


def rehoming_hook(orders: Callable = wanted_at, **settings: Any) -> Callable[[list], list]:
    """FSSDP that looks for homes at every third iteration, and finds those that ``orders`` gives."""
    find(orders)
    return tiny_gpt.fssdp_hook(**{"rehome": 3, **settings})
