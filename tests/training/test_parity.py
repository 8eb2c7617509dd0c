"""FSSDP trains the model stock Megatron trains. Oracle: the same model, not converted, on the same ranks and data.

Each case trains the tiny GPT in one set of processes (stock, FSSDP without slots, with two, and of some cases that
again) and compares losses, every parameter's main gradient of the last step, and every parameter. Without replicas they
must agree bit for bit; with replicas only summation order differs, in the same way whenever the run is repeated.
"""

from __future__ import annotations

from typing import Any

import pytest
from quick import quick
from ranks import ranks


def _case_of(name: str) -> Any:
    import tiny_gpt

    _, fields, settings = LAYOUTS[name]
    case = tiny_gpt.Case(**fields, settings=tuple(settings.items()))
    tiny_gpt.initialize(case)
    return case


def _compare(name: str) -> None:
    import tiny_gpt
    import torch.distributed as dist

    case = _case_of(name)
    stock = tiny_gpt.train(case)
    without = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(slots=0))
    assert tiny_gpt.difference(stock, without) == tiny_gpt.SAME, (
        "without replicas it must be bitwise"
    )
    ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook())
    tolerance = tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5
    worst = tiny_gpt.assert_trained_alike(stock, ours, name, tolerance=tolerance)
    if dist.get_rank() == 0:
        print(
            f"\nparity | {name} | {ours.replicas} | {worst['loss']:.1e} | {worst['grad']:.1e} |",
            flush=True,
        )
    if name in TWICE.split():
        _assert_same(ours, tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook()))


def _repeat(name: str) -> None:
    import tiny_gpt

    case = _case_of(name)
    ours, again = (tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook()) for _ in range(2))
    assert ours.replicas > 0
    _assert_same(ours, again)


def _assert_same(ours: Any, again: Any) -> None:
    import tiny_gpt

    assert tiny_gpt.difference(ours, again) == tiny_gpt.SAME, "two runs differ"


MTP_REPEATED = dict(mtp_num_layers=3, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.3)
# name: (ranks, fields of tiny_gpt.Case, fields of TransformerConfig). Those named core run on megatron-core 0.16.1 too.
LAYOUTS: dict[str, tuple[int, dict, dict]] = {
    "core-ep2": (2, {}, {}),
    "core-ep4": (4, dict(ep=4), {}),
    "core-ep2-accumulate4": (2, dict(accumulate=4), {}),
    "core-ep2-distopt-overlap-accumulate4": (
        2,
        dict(distributed_optimizer=True, overlap=True, accumulate=4),
        {},
    ),
    "core-ep2-edp2-distopt-overlap": (
        4,
        dict(distributed_optimizer=True, overlap=True, accumulate=2),
        {},
    ),
    "core-tp2-sp-etp1-ep2": (2, dict(tp=2), {}),
    "core-tp2-sp-etp2-ep2": (4, dict(tp=2, etp=2), {}),
    "core-pp2-ep2-accumulate4": (4, dict(pp=2, accumulate=4), {}),
    "core-pp2-vpp2-ep2-accumulate4": (4, dict(pp=2, vpp=2, accumulate=4), {}),
    "core-allgather": (2, {}, dict(moe_token_dispatcher_type="allgather")),
    "ep2-edp2": (4, dict(accumulate=2), {}),
    "ep2-edp2-overlap": (4, dict(overlap=True, accumulate=4), {}),
    "ep2-edp2-distopt": (4, dict(distributed_optimizer=True), {}),
    "ep4-distopt-overlap-accumulate4": (
        4,
        dict(ep=4, distributed_optimizer=True, overlap=True, accumulate=4),
        {},
    ),
    "tp2-sp-etp1-ep4": (4, dict(tp=2, ep=4), {}),
    "tp2-sp-etp2-ep2-distopt-overlap": (
        4,
        dict(tp=2, etp=2, distributed_optimizer=True, overlap=True),
        {},
    ),
    "tp2-sp-etp2-allgather": (4, dict(tp=2, etp=2), dict(moe_token_dispatcher_type="allgather")),
    "pp2-ep2": (4, dict(pp=2), {}),
    "pp2-ep2-distopt-overlap": (
        4,
        dict(pp=2, accumulate=4, distributed_optimizer=True, overlap=True),
        {},
    ),
    "pp2-vpp2-ep2-distopt-overlap": (
        4,
        dict(pp=2, vpp=2, accumulate=4, distributed_optimizer=True, overlap=True),
        {},
    ),
    "cp2-ep2": (2, dict(cp=2), {}),
    "cp2-tp2-ep4": (4, dict(cp=2, tp=2, ep=4), {}),
    "recompute-full": (
        2,
        dict(accumulate=2),
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    ),
    "core-recompute-moe": (
        2,
        dict(accumulate=2),
        dict(recompute_granularity="selective", recompute_modules=["moe"]),
    ),
    "recompute-full-edp2-distopt-overlap": (
        4,
        dict(accumulate=2, distributed_optimizer=True, overlap=True),
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    ),
    "core-shared-experts": (2, {}, dict(moe_shared_expert_intermediate_size=32)),
    "shared-experts-overlap": (
        2,
        {},
        dict(moe_shared_expert_intermediate_size=32, moe_shared_expert_overlap=True),
    ),
    "core-aux-loss": (
        2,
        dict(accumulate=2),
        dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2),
    ),
    "seq-aux-loss": (
        2,
        {},
        dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1e-2),
    ),
    "global-aux-loss": (
        2,
        dict(accumulate=2),
        dict(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1e-2),
    ),
    "probs-on-input": (
        2,
        {},
        dict(moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True),
    ),
    "z-loss": (2, {}, dict(moe_z_loss_coeff=1e-3)),
    "core-expert-bias": (
        2,
        dict(accumulate=2),
        dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"),
    ),
    "capacity": (
        2,
        {},
        dict(moe_expert_capacity_factor=1.0, moe_router_load_balancing_type="aux_loss"),
    ),
    "capacity-position": (
        2,
        {},
        dict(
            moe_expert_capacity_factor=1.0,
            moe_token_drop_policy="position",
            moe_router_load_balancing_type="aux_loss",
        ),
    ),
    "capacity-padded": (
        2,
        dict(accumulate=2),
        dict(
            moe_expert_capacity_factor=2.0,
            moe_pad_expert_input_to_capacity=True,
            add_bias_linear=True,
        ),
    ),
    "capacity-padded-allgather-ep4": (
        4,
        dict(ep=4),
        dict(
            moe_expert_capacity_factor=1.5,
            moe_pad_expert_input_to_capacity=True,
            moe_token_dispatcher_type="allgather",
        ),
    ),
    "group-limited-topk": (
        2,
        {},
        dict(moe_router_num_groups=4, moe_router_group_topk=2, moe_router_score_function="sigmoid"),
    ),
    "biases": (2, {}, dict(add_bias_linear=True)),
    "core-one-expert": (2, dict(one_expert=True), {}),
    "one-expert-ep4": (4, dict(one_expert=True, ep=4, experts=4, accumulate=2), {}),
    "one-home-per-rank": (4, dict(ep=4, experts=4), {}),
    "many-experts": (2, dict(experts=32, skew=3.0), {}),
    "calculate-per-token-loss": (2, dict(accumulate=2), dict(calculate_per_token_loss=True)),
    "ep-comm-overlap": (2, dict(accumulate=4), dict(overlap_moe_expert_parallel_comm=True)),
    "ep-comm-overlap-distopt": (
        2,
        dict(accumulate=4, distributed_optimizer=True, overlap=True),
        dict(overlap_moe_expert_parallel_comm=True),
    ),
    "ep-comm-overlap-pp2-vpp2": (
        4,
        dict(pp=2, vpp=2, accumulate=4, distributed_optimizer=True, overlap=True),
        dict(overlap_moe_expert_parallel_comm=True),
    ),
    "mtp": (2, dict(accumulate=2), dict(mtp_num_layers=1, mtp_loss_scaling_factor=0.1)),
    "mtp-repeated": (2, dict(accumulate=2, distributed_optimizer=True, overlap=True), MTP_REPEATED),
    "mtp-repeated-recompute": (
        2,
        dict(accumulate=2),
        dict(
            MTP_REPEATED,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        ),
    ),
    "mtp-repeated-pp2": (4, dict(pp=2, accumulate=4), MTP_REPEATED),
    "moe-every-second-layer": (2, {}, dict(moe_layer_freq=2)),
    "core-bf16": (2, dict(bf16=True, accumulate=4), {}),
    "bf16-distopt-overlap-edp2": (
        4,
        dict(bf16=True, distributed_optimizer=True, overlap=True, accumulate=4),
        {},
    ),
}


# In ``make test``. Each value of a layout, each schedule, dispatcher and way to drop or weight tokens occurs in one.
QUICK = """
core-ep2 core-ep2-distopt-overlap-accumulate4 core-tp2-sp-etp1-ep2 core-allgather recompute-full
core-recompute-moe shared-experts-overlap core-aux-loss
core-expert-bias capacity-padded core-one-expert ep-comm-overlap-distopt
mtp-repeated core-bf16
core-ep2-edp2-distopt-overlap core-tp2-sp-etp2-ep2 core-pp2-vpp2-ep2-accumulate4
cp2-tp2-ep4
"""
# Trained twice there; all other layouts are in `test_the_same_run_twice_on_two_ranks` and its neighbour.
TWICE = """
core-ep2 core-ep2-distopt-overlap-accumulate4 core-recompute-moe core-bf16
core-ep2-edp2-distopt-overlap core-pp2-vpp2-ep2-accumulate4
"""


def _layouts(num_ranks: int, chosen: str, but: str = "") -> list:
    """The layouts for so many ranks; all but the core ones are left to the newest Megatron."""
    assert {*chosen.split(), *but.split()} <= LAYOUTS.keys()
    names = [name for name, (ranks_, *_) in LAYOUTS.items() if ranks_ == num_ranks]
    names = [name for name in names if name not in but.split()]
    core = [name for name in names if name.startswith("core")]
    return quick(names, [name for name in names if name in chosen.split()], oldest=core)


@pytest.mark.parametrize("name", _layouts(2, QUICK))
@ranks(2)
def test_two_ranks(name: str) -> None:
    _compare(name)


@pytest.mark.parametrize("name", _layouts(4, QUICK))
@ranks(4)
def test_four_ranks(name: str) -> None:
    _compare(name)


@pytest.mark.parametrize("name", _layouts(2, "", but=TWICE))
@ranks(2)
def test_the_same_run_twice_on_two_ranks(name: str) -> None:
    _repeat(name)


@pytest.mark.parametrize("name", _layouts(4, "", but=TWICE))
@ranks(4)
def test_the_same_run_twice_on_four_ranks(name: str) -> None:
    _repeat(name)


@pytest.mark.slow
@ranks(2)
def test_twenty_steps() -> None:
    """Differences of summation order do not grow: losses within 1e-5 of stock over 20 steps, and replicas in use."""
    import tiny_gpt

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=20)
    ours = tiny_gpt.train(case, steps=20, hook=tiny_gpt.fssdp_hook())
    assert ours.replicas > 0 and stock.losses[0] - stock.losses[-1] > 0.3, (
        "the model does not learn"
    )
    assert tiny_gpt.difference(stock, ours)["loss"] <= 1e-5
