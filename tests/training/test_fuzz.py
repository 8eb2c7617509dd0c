"""Random combinations of settings: stock against no slots, and against some.

Oracle: stock Megatron on the same ranks: bitwise without slots, to 1e-5 with replicas. A draw that stock Megatron
refuses, or that FSSDP refuses when it is switched on, counts as no test; the last line says how many did.

``FUZZ_SEED`` and ``FUZZ_DRAWS`` choose other and more draws (by default 0 and 12 for each number of ranks).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from layouts import COMBINED, DELAYED, FULL, FUSED_WGRAD, MTP_REPEATED, SHARED_EXPERTS, balanced
from ranks import ranks

from megatron_hecate.comm.agreement import SwitchOnError

SEED = int(os.environ.get("FUZZ_SEED", "0"))
DRAWS = int(os.environ.get("FUZZ_DRAWS", "12"))
STEPS = 4
PARALLEL = {
    2: [{}],
    4: [dict(ep=4), {}, dict(tp=2), dict(tp=2, etp=2), dict(pp=2), dict(pp=2, vpp=2), dict(cp=2)],
}
MODELS = [
    {},
    SHARED_EXPERTS,
    dict(moe_expert_capacity_factor=1.5, moe_token_drop_policy="probs"),
    balanced("aux_loss"),
    MTP_REPEATED,
    COMBINED,
    DELAYED,
    FUSED_WGRAD,
]


def _draw(choose: random.Random, world_size: int) -> tuple[dict, dict, dict]:
    """Fields of `tiny_gpt.Case`, of TransformerConfig, and settings of FSSDP."""
    fields = dict(
        choose.choice(PARALLEL[world_size]),
        accumulate=choose.choice([1, 2, 3, 4]),
        overlap=choose.random() < 0.5,
        distributed_optimizer=choose.random() < 0.5,
        skew=choose.choice([0.0, 1.5, 4.0]),
        experts=choose.choice([4, 8, 16]),
        bucket_size=choose.choice([1, 1000, 4000, 10**9]),
    )
    if "vpp" in fields:
        fields["accumulate"] = choose.choice([2, 4])
    top_k = choose.choice([1, 2, 3])
    model = dict(
        moe_router_topk=top_k,
        moe_router_pre_softmax=top_k == 1,
        moe_token_dispatcher_type=choose.choice(["alltoall", "alltoall", "allgather"]),
    )
    model |= choose.choice(MODELS)
    if "overlap_moe_expert_parallel_comm" in model:
        # Megatron frees the memory that it gathers all tokens in; with pipelines some ranks fail, others wait
        model["moe_token_dispatcher_type"] = "alltoall"
    if choose.random() < 0.3:
        model |= FULL
    homes = fields["experts"] // fields.get("ep", 2)
    elsewhere = fields["experts"] - homes
    # also more slots than homes, and rarely more than there are experts elsewhere, which is refused
    too_many = elsewhere + 1 if choose.random() < 0.1 else 2
    settings = dict(
        slots=choose.choice([1, 2, min(homes + 2, elsewhere), too_many]),
        lifetime=choose.choice(["iteration", "layer"]),
        late_replicas=choose.choice([0, 0, 3]),
        transport=choose.choice(["p2p", "p2p", "nvlink"]),
    )
    return fields, model, settings


def _refused(act: Callable[[], None], kind: type[Exception]) -> bool:
    """Whether ``act`` fails on every rank; raises where it does on some only."""
    error: Exception | None = None
    try:
        act()
    except kind as refusal:
        error = refusal
        # at once: where other ranks wait for this one, nothing else says why
        print(f"  rank {dist.get_rank()}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    failed = torch.tensor(int(error is not None))
    dist.all_reduce(failed)
    count = int(failed)
    assert count in (0, dist.get_world_size()), f"{count} ranks failed, this one with {error!r}"
    return count > 0


def _compare(seed: int, world_size: int) -> int | None:
    """Tokens that replicas of all ranks computed; None where the draw is refused."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    choose = random.Random(seed)
    fields, model, settings = _draw(choose, world_size)
    # other experts become hot after every second step, or the same ones stay so
    move = tiny_gpt.move_skew_sometimes if choose.random() < 0.5 else None
    if dist.get_rank() == 0:
        print(f"seed {seed}: {fields}, {model}, {settings}, {move}", flush=True)
    tiny_gpt.parallel_state.destroy_model_parallel()
    destroy_moe_metrics_tracker()  # its tensors are as long as the first model is deep
    case, computed, trained = tiny_gpt.Case(**fields, settings=model), torch.zeros(1), []

    def train(hook: Any) -> None:
        trained.append(tiny_gpt.train(case, steps=STEPS, hook=hook, before_step=move))

    def train_stock() -> None:
        tiny_gpt.initialize(case)
        train(None)

    def train_ours() -> None:
        train(tiny_gpt.fssdp_hook(**{**settings, "slots": 0, "late_replicas": 0}))
        train(tiny_gpt.counting_hook(tiny_gpt.fssdp_hook(**settings), computed))

    if _refused(train_stock, Exception) or _refused(train_ours, SwitchOnError):
        return None
    stock, without, ours = trained
    dist.all_reduce(computed)
    assert tiny_gpt.difference(stock, without) == tiny_gpt.SAME, seed
    worst = tiny_gpt.difference(stock, ours)
    assert worst["loss"] <= 1e-5 and worst["grad"] <= 1e-4, (seed, worst)
    return int(computed)


@pytest.mark.newest
@pytest.mark.slow
@pytest.mark.parametrize("world_size", PARALLEL)
@ranks(lambda world_size: world_size, timeout=60.0 + 60.0 * DRAWS)
def test_random_combinations(world_size: int) -> None:
    tiny_gpt.install_fused_wgrad()
    tokens = [_compare(seed, world_size) for seed in range(1000 * SEED, 1000 * SEED + DRAWS)]
    compared = [count for count in tokens if count is not None]
    with_replicas = sum(count > 0 for count in compared)
    if dist.get_rank() == 0:
        print(f"{DRAWS} draws, {len(compared)} compared, {with_replicas} with replicas", flush=True)
    assert with_replicas >= DRAWS // 4
