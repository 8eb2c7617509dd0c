"""Homes move under every parallel layout and setting of the model, and the model is the one stock Megatron trains.

Oracle: unconverted Megatron on the same ranks: bit for bit without replicas up to top-2 routing, with the optimizer's
state; else within a tolerance (`training_with_moves`).
"""

from __future__ import annotations

from typing import Any

import pytest
from ranks import ranks
from training_with_moves import params

pytestmark = pytest.mark.newest

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SHARDED = dict(distributed_optimizer=True, overlap=True)
MTP_REPEATED = dict(mtp_num_layers=3, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.3)
COMBINED = dict(overlap_moe_expert_parallel_comm=True)
# name: (ranks, fields of tiny_gpt.Case, fields of TransformerConfig)
LAYOUTS: dict[str, tuple[int, dict, dict]] = {
    "ep2": (2, {}, {}),
    "ep4": (4, dict(ep=4), {}),
    "ep4-distopt-overlap-accumulate2": (4, dict(ep=4, accumulate=2, **SHARDED), {}),
    "edp2": (4, dict(accumulate=2), {}),
    "edp2-overlap": (4, dict(overlap=True), {}),
    "edp2-distopt": (4, dict(distributed_optimizer=True), {}),
    "edp2-distopt-overlap": (4, dict(accumulate=2, **SHARDED), {}),
    "edp2-distopt-overlap-bf16": (4, dict(bf16=True, accumulate=2, **SHARDED), {}),
    "tp2-etp1": (2, dict(tp=2), {}),
    "tp2-etp2": (4, dict(tp=2, etp=2), {}),
    "tp2-etp2-distopt-overlap": (4, dict(tp=2, etp=2, **SHARDED), {}),
    "pp2": (4, dict(pp=2, accumulate=4), {}),
    "pp2-vpp2": (4, dict(pp=2, vpp=2, accumulate=4), {}),
    "pp2-vpp2-distopt-overlap": (4, dict(pp=2, vpp=2, accumulate=4, **SHARDED), {}),
    "pp2-vpp2-moe-in-one-chunk": (
        4,
        dict(pp=2, vpp=2, accumulate=4),
        dict(moe_layer_freq=[0, 0, 1, 1]),
    ),
    "cp2": (2, dict(cp=2), {}),
    "recompute-full": (2, dict(accumulate=2), FULL),
    "recompute-moe": (
        2,
        dict(accumulate=2),
        dict(recompute_granularity="selective", recompute_modules=["moe"]),
    ),
    "bf16": (2, dict(bf16=True, accumulate=2), {}),
    "bf16-distopt": (2, dict(bf16=True, distributed_optimizer=True), {}),
    "shared-experts": (2, {}, dict(moe_shared_expert_intermediate_size=32)),
    "expert-bias": (
        2,
        {},
        dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"),
    ),
    "aux-loss": (2, {}, dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2)),
    "seq-aux-loss": (
        2,
        {},
        dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1e-2),
    ),
    "sinkhorn": (2, {}, dict(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1)),
    "global-aux-loss": (
        2,
        {},
        dict(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1e-2),
    ),
    "top3": (2, dict(accumulate=2), dict(moe_router_topk=3)),
    "top4-edp2-distopt-overlap": (4, dict(accumulate=2, **SHARDED), dict(moe_router_topk=4)),
    "allgather": (2, {}, dict(moe_token_dispatcher_type="allgather")),
    "capacity-padded": (
        2,
        {},
        dict(
            moe_expert_capacity_factor=2.0,
            moe_pad_expert_input_to_capacity=True,
            add_bias_linear=True,
        ),
    ),
    "capacity-dropped": (2, {}, dict(moe_expert_capacity_factor=0.6)),
    "biases-distopt": (2, SHARDED, dict(add_bias_linear=True)),
    "mtp": (2, dict(accumulate=2), dict(mtp_num_layers=1, mtp_loss_scaling_factor=0.1)),
    "mtp-repeated": (2, dict(accumulate=2, **SHARDED), MTP_REPEATED),
    "moe-every-second-layer": (2, {}, dict(moe_layer_freq=2)),
    "ep-comm-overlap": (2, dict(accumulate=4, **SHARDED), COMBINED),
    "ep-comm-overlap-pp2-vpp2": (4, dict(pp=2, vpp=2, accumulate=4, **SHARDED), COMBINED),
    "one-home-per-rank": (4, dict(ep=4, experts=4), {}),
    "many-experts": (2, dict(experts=32, skew=3.0, **SHARDED), {}),
}


@pytest.mark.parametrize("name", params(LAYOUTS, 2, "top3"))
@ranks(2)
def test_two_ranks(name: str) -> None:
    _compare(name)


@pytest.mark.parametrize("name", params(LAYOUTS, 4, "pp2-vpp2-distopt-overlap"))
@ranks(4)
def test_four_ranks(name: str) -> None:
    _compare(name)


def _compare(name: str, **settings: Any) -> None:
    import tiny_gpt
    import training_with_moves

    _, fields, of_model = LAYOUTS[name]
    case = tiny_gpt.Case(**fields, settings=tuple(of_model.items()))
    tiny_gpt.initialize(case)
    training_with_moves.compare(
        case, tolerance=tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5, **settings
    )
