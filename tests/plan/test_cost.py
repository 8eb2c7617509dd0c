"""What replicas cost, against sums done by hand: round speeds on two nodes of two ranks."""

from __future__ import annotations

import dataclasses

import pytest
from plan_cases import ROUND_SPEEDS

from megatron_hecate.plan import LayerShape, World

pytestmark = pytest.mark.fast
TWO_NODES, ONE_NODE = World((0, 0, 1, 1), ROUND_SPEEDS), World((0,) * 4, ROUND_SPEEDS)
SHAPE = LayerShape(expert_bytes=200, grad_bytes=400, token_bytes=10, token_flops=4.0)


def test_copies_out_and_back_in_tokens() -> None:
    assert SHAPE.token_seconds(TWO_NODES) == 2.0  # 3 x 4 FLOPs at 6 FLOP/s
    assert SHAPE.fetch_seconds(TWO_NODES) == 22.0 and SHAPE.fetch_seconds(ONE_NODE) == 3.0
    cost = SHAPE.copy_cost(TWO_NODES, hidden=0.5)
    # 200 and 400 bytes at 100 bytes/s + 1 s each; at 10 bytes/s + 2 s each; a token takes 2 s
    assert (cost.near, cost.far) == (8 / 2, 64 / 2)
    assert (cost.out, cost.hidden) == (22 / 64, 0.5 * 22 / 2)
    assert (cost.contention, cost.routing, cost.most) == (0.25, 0.25, None)
    assert cost.crossing == 4 * 10 / 10 / 2  # four trips of 10 bytes at 10 bytes/s


def test_a_further_expert_of_a_rank_reads_weights_twice_and_adds_to_its_gradient() -> None:
    # 200 bytes twice, 400 read and written: 1,200 at 300 bytes/s, + 3 s; a token takes 2 s
    assert SHAPE.expert_seconds(TWO_NODES) == 7.0
    assert SHAPE.copy_cost(TWO_NODES, hidden=9.0).computing == 3.5
    assert dataclasses.replace(SHAPE, microbatches=4, fetches=4).copy_cost(
        ONE_NODE
    ).computing == pytest.approx(4 * 3.5)


def test_every_fetch_return_and_microbatch_counts() -> None:
    often = dataclasses.replace(SHAPE, fetches=3, returns=2, microbatches=4).copy_cost(
        TWO_NODES, hidden=1
    )
    assert often.far == (3 * 22 + 2 * 42) / 2 and often.out == 66 / 150
    assert often.hidden == 3 * 22 / 2 and often.routing == 4 * 0.25
