"""Random combinations of settings: stock against no slots, and against some.

Oracle: stock Megatron on the same ranks: bitwise without slots, to 1e-5 with replicas. A draw that stock Megatron refuses, or that FSSDP refuses when it is switched on, counts as no test; the last
line says how many did.

``FUZZ_SEED`` and ``FUZZ_DRAWS`` choose other and more draws (by default 0 and 12 for each number of ranks).
"""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import FULL
from ranks import ranks

from megatron_hecate.comm.agreement import SwitchOnError

SEED = int(os.environ.get("FUZZ_SEED", "0"))
DRAWS = int(os.environ.get("FUZZ_DRAWS", "12"))
STEPS = 4
TIMEOUT = 60.0 + 60.0 * DRAWS


@dataclasses.dataclass(frozen=True)
class Draw:
    """One combination.

    Args:
        fields: of `tiny_gpt.Case`.
        settings: of ``TransformerConfig``.
        config: of ``HecateConfig``.
        moves_skew: whether other experts become hot after every second step.
    """

    fields: dict[str, Any]
    settings: dict[str, Any]
    config: dict[str, Any]
    moves_skew: bool

    @classmethod
    def random(cls, seed: int, world_size: int) -> Draw:
        choose = random.Random(seed)
        layouts: list[dict[str, Any]] = [dict(ep=2)]
        if world_size == 4:
            layouts = [
                dict(ep=4),
                dict(ep=2),
                dict(ep=2, tp=2),
                dict(ep=2, tp=2, etp=2),
                dict(ep=2, pp=2),
                dict(ep=2, pp=2, vpp=2),
                dict(ep=2, cp=2),
            ]
        fields = choose.choice(layouts)
        fields |= dict(
            accumulate=choose.choice([1, 2, 3, 4]),
            overlap=choose.random() < 0.5,
            distributed_optimizer=choose.random() < 0.5,
            skew=choose.choice([0.0, 1.5, 4.0]),
            experts=choose.choice([4, 8, 16]),
            bucket_size=choose.choice([1, 1000, 4000, 10**9]),
        )
        if "vpp" in fields:
            fields["accumulate"] = choose.choice([2, 4])
        settings: dict[str, Any] = dict(
            moe_router_topk=choose.choice([1, 2, 3]),
            moe_token_dispatcher_type=choose.choice(["alltoall", "alltoall", "allgather"]),
        )
        if settings["moe_router_topk"] == 1:
            settings["moe_router_pre_softmax"] = True
        extras: list[dict[str, Any]] = [
            {},
            dict(moe_shared_expert_intermediate_size=32),
            dict(moe_expert_capacity_factor=1.5, moe_token_drop_policy="probs"),
            dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2),
            dict(mtp_num_layers=2, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.3),
            dict(overlap_moe_expert_parallel_comm=True),
            dict(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True),
            dict(gradient_accumulation_fusion=True),
        ]
        settings |= choose.choice(extras)
        if "overlap_moe_expert_parallel_comm" in settings:
            # Megatron frees the memory that it gathers all tokens in; with pipelines some ranks fail, others wait
            settings["moe_token_dispatcher_type"] = "alltoall"
        if choose.random() < 0.3:
            settings |= FULL
        homes = fields["experts"] // fields["ep"]
        elsewhere = fields["experts"] - homes

        config = dict(
            # also more than homes, and rarely more than there are experts elsewhere, which is refused
            slots=choose.choice(
                [1, 2, min(homes + 2, elsewhere), elsewhere + 1 if choose.random() < 0.1 else 2]
            ),
            lifetime=choose.choice(["iteration", "layer"]),
            late_replicas=choose.choice([0, 0, 3]),
            transport=choose.choice(["p2p", "p2p", "nvlink"]),
        )
        return cls(fields, settings, config, choose.random() < 0.5)


def _train(draw: Draw, config: dict[str, Any] | None, computed: torch.Tensor | None = None) -> Any:
    """Train stock (``None``) or FSSDP with ``config``; returns a `tiny_gpt.Trained`.

    Args:
        computed: [1], gets the tokens that replicas of this rank compute.
    """
    import tiny_gpt

    case = tiny_gpt.Case(**draw.fields, settings=draw.settings)
    hook = None if config is None else tiny_gpt.fssdp_hook(**config)
    if computed is not None:
        hook = tiny_gpt.counting_hook(hook, computed)
    move = tiny_gpt.move_skew_sometimes if draw.moves_skew else None
    return tiny_gpt.train(case, steps=STEPS, hook=hook, before_step=move)


def _refused_alike(error: Exception | None) -> bool:
    """Whether every rank has an ``error``; raises where only some have."""
    if error is not None:
        # at once: where other ranks wait for this one, nothing else says why
        print(f"  rank {dist.get_rank()}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    failed = torch.tensor(int(error is not None))
    dist.all_reduce(failed)
    assert int(failed) in (0, dist.get_world_size()), (
        f"{int(failed)} ranks failed, this one with {error!r}"
    )
    return int(failed) > 0


def _fuzz(world_size: int) -> None:
    import tiny_gpt
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    tiny_gpt.install_fused_wgrad()
    compared = with_replicas = 0
    for seed in range(1000 * SEED, 1000 * SEED + DRAWS):
        draw = Draw.random(seed, world_size)
        if dist.get_rank() == 0:
            print(f"seed {seed}: {draw}", flush=True)
        parallel_state.destroy_model_parallel()
        destroy_moe_metrics_tracker()  # its tensors are as long as the first model is deep
        error: Exception | None = None
        try:
            tiny_gpt.initialized(**draw.fields, settings=draw.settings)
            stock = _train(draw, None)
        except Exception as stocks:
            error = stocks
        if _refused_alike(error):
            if dist.get_rank() == 0:
                print(f"  stock: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        try:
            without = _train(draw, {**draw.config, "slots": 0, "late_replicas": 0})
            computed = torch.zeros(1)
            ours = _train(draw, draw.config, computed)
        except SwitchOnError as refusal:
            error = refusal
        if _refused_alike(error):
            if dist.get_rank() == 0:
                print(f"  refused: {str(error)[:300]}", flush=True)
            continue
        compared += 1
        dist.all_reduce(computed)
        with_replicas += bool(computed)
        if dist.get_rank() == 0:
            print(f"  {int(computed)} tokens in replicas", flush=True)
        assert tiny_gpt.difference(stock, without) == tiny_gpt.SAME, (seed, draw)
        worst = tiny_gpt.difference(stock, ours)
        assert worst["loss"] <= 1e-5 and worst["grad"] <= 1e-4, (seed, worst, draw)
    if dist.get_rank() == 0:
        print(f"{DRAWS} draws, {compared} compared, {with_replicas} with replicas", flush=True)
    assert with_replicas >= DRAWS // 4


@pytest.mark.newest
@pytest.mark.slow
@ranks(2, timeout=TIMEOUT)
def test_two_ranks() -> None:
    _fuzz(2)


@pytest.mark.newest
@pytest.mark.slow
@ranks(4, timeout=TIMEOUT)
def test_four_ranks() -> None:
    _fuzz(4)
