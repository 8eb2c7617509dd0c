"""Modelled seconds of one layer against sums done by hand.

Oracle: a world of round numbers, two nodes of two ranks, whose phases a reader can add up on paper; and the rule of
thumb that a copy's price in tokens depends on link and FLOP/s, hardly on the expert's size. If a direction, a pass, a
shared network or a microbatch were forgotten, the sums differ, and planners would copy what does not pay.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_hecate.plan import LayerShape, Link, Placement, Quotas, Speeds, World, split_quotas
from megatron_hecate.plan.cost import copy_traffic, layer_seconds, token_traffic
from megatron_hecate.plan.world import H100

SPEEDS = Speeds(
    intra=Link(bandwidth=100.0, latency=1.0),
    inter=Link(bandwidth=10.0, latency=2.0),
    flops=6.0,
    routing=0.5,
    contention=0.25,
)
TWO_NODES = World(node=(0, 0, 1, 1), speeds=SPEEDS)
ONE_NODE = World(node=(0, 0, 0, 0), speeds=SPEEDS)
SHAPE = LayerShape(expert_bytes=200, grad_bytes=400, token_bytes=10, token_flops=4.0)

# Four experts at home on four ranks. [source, expert]; ranks compute 6 8 12 14 tokens
TOKENS = [[5, 3, 2, 0], [0, 5, 0, 5], [0, 0, 10, 0], [1, 0, 0, 9]]
HOMES = Placement.initial(4, 4, num_slots=1)
EVERYWHERE = HOMES.with_guests([(0, 1), (0, 2), (0, 3)])


def _at_home(tokens: object = TOKENS) -> Quotas:
    return Quotas(expert=np.arange(4), rank=np.arange(4), tokens=np.array(tokens))


# sizes and prices


def test_a_gated_expert_of_three_matrices() -> None:
    shape = LayerShape.swiglu(4, 5, microbatches=7, hidden_seconds=0.25)
    assert shape == LayerShape(
        expert_bytes=120, grad_bytes=240, token_bytes=8, token_flops=120.0, microbatches=7, hidden_seconds=0.25
    )


def test_a_token_takes_one_forward_and_twice_that_backward() -> None:
    assert SHAPE.token_seconds(TWO_NODES) == 2.0  # 3 x 4 FLOPs at 6 FLOP/s


@pytest.mark.parametrize(
    ("world", "seconds", "tokens"),
    [
        (ONE_NODE, 8.0, 4.0),  # 600 bytes at 100 bytes/s and two messages of 1 s; a token takes 2 s
        (TWO_NODES, 64.0, 32.0),  # 600 bytes at 10 bytes/s and two messages of 2 s
    ],
)
def test_a_copy_goes_out_and_back(world: World, seconds: float, tokens: float) -> None:
    assert SHAPE.copy_seconds(world) == seconds
    assert SHAPE.copy_tokens(world) == tokens
    # a copy is fetched once for all microbatches, so it must win the same number of tokens in all
    assert dataclasses.replace(SHAPE, microbatches=3).copy_tokens(world) == tokens


def test_routing_is_paid_by_every_microbatch() -> None:
    assert SHAPE.routing_tokens(ONE_NODE) == 0.25
    assert dataclasses.replace(SHAPE, microbatches=3).routing_tokens(ONE_NODE) == 0.75


@pytest.mark.parametrize(("hidden", "ffn"), [(2048, 768), (2048, 1024), (4096, 1536), (7168, 2048), (4096, 14336)])
def test_on_an_h100_a_copy_costs_a_thousand_tokens_inside_a_node_and_ten_across(hidden: int, ffn: int) -> None:
    # 6 bytes and 6 FLOPs per weight: FLOP/s over bytes/s is 445.05e12 / 360e9 = 1,236 and 445.05e12 / 45e9 = 9,890;
    # the rest is latency
    shape = LayerShape.swiglu(hidden, ffn)
    assert 1_236 <= shape.copy_tokens(World(node=(0, 0))) <= 1_500
    assert 9_890 <= shape.copy_tokens(World(node=(0, 1))) <= 13_000
    inside = 445.05e12 / 360e9 + 2 * 5e-6 * 445.05e12 / (18 * hidden * ffn)
    assert shape.copy_tokens(World(node=(0, 0), speeds=H100)) == pytest.approx(inside)


# traffic


def test_tokens_by_kind_of_link() -> None:
    traffic = token_traffic(_at_home(), TWO_NODES)
    assert traffic.intra_out.tolist() == [3, 0, 0, 0]
    assert traffic.intra_in.tolist() == [0, 3, 0, 0]
    assert traffic.inter_out.tolist() == [2, 5, 0, 1]
    assert traffic.inter_in.tolist() == [1, 0, 2, 5]
    assert (traffic.intra, traffic.inter) == (3, 8)
    # rank 0: 30 bytes at 100 bytes/s, 1 s latency; node 0: 70 bytes at 2 x 10 bytes/s, 2 s; side by side
    assert traffic.seconds(10, TWO_NODES) == 5.5
    assert dataclasses.replace(traffic, inter_out=np.zeros(4), inter_in=np.zeros(4)).seconds(10, TWO_NODES) == 1.3


def test_the_busier_direction_counts() -> None:
    out = token_traffic(_at_home([[0, 4, 4, 4], [0] * 4, [0] * 4, [0] * 4]), ONE_NODE)
    back = token_traffic(_at_home([[0] * 4, [4, 0, 0, 0], [4, 0, 0, 0], [4, 0, 0, 0]]), ONE_NODE)
    assert out.seconds(10, ONE_NODE) == back.seconds(10, ONE_NODE) == 2.2  # 120 bytes, 1 s
    to_node = token_traffic(_at_home([[0, 0, 0, 0], [0, 0, 0, 0], [3, 5, 0, 0], [0, 0, 0, 0]]), TWO_NODES)
    assert to_node.seconds(10, TWO_NODES) == 6.0  # 80 bytes at 20 bytes/s, 2 s


def test_tokens_of_guests_leave_for_their_holder() -> None:
    quotas = Quotas(np.array([0, 0, 1, 2, 3]), np.array([0, 3, 1, 2, 3]), np.array([[1, 2, 0, 0, 0]] + [[0] * 5] * 3))
    traffic = token_traffic(quotas, TWO_NODES)
    assert traffic.inter_out.tolist() == [2, 0, 0, 0]
    assert traffic.inter_in.tolist() == [0, 0, 0, 2]
    assert traffic.intra == 0


def test_nothing_sent_takes_no_time() -> None:
    assert token_traffic(_at_home(np.diag([3, 4, 5, 6])), TWO_NODES).seconds(10, TWO_NODES) == 0
    assert copy_traffic(HOMES, TWO_NODES).seconds(200, TWO_NODES) == 0


def test_plain_copies_leave_their_home_one_by_one() -> None:
    traffic = copy_traffic(EVERYWHERE, ONE_NODE)
    assert traffic.intra_out.tolist() == [3, 0, 0, 0]
    assert traffic.intra_in.tolist() == [0, 1, 1, 1]
    assert traffic.inter == 0


def test_one_copy_crosses_to_each_node_and_is_handed_on_there() -> None:
    traffic = copy_traffic(EVERYWHERE, TWO_NODES)
    assert traffic.intra_out.tolist() == [1, 0, 1, 0]
    assert traffic.intra_in.tolist() == [0, 1, 0, 1]
    assert traffic.inter_out.tolist() == [1, 0, 0, 0]
    assert traffic.inter_in.tolist() == [0, 0, 1, 0]


def test_from_three_receivers_on_shares_are_exchanged() -> None:
    traffic = copy_traffic(EVERYWHERE, ONE_NODE, scatter=True)
    assert traffic.intra_out == pytest.approx(np.array([1, 2 / 3, 2 / 3, 2 / 3]))
    assert traffic.intra_in == pytest.approx(np.array([0, 1, 1, 1]))
    two = HOMES.with_guests([(0, 1), (0, 2)])
    assert copy_traffic(two, ONE_NODE, scatter=True).intra_out.tolist() == [2, 0, 0, 0]
    # on another node it is the first receiver who scatters: ranks 1-4 there, so three from rank 1
    far = Placement.initial(5, 5, num_slots=1).with_guests([(0, 1), (0, 2), (0, 3), (0, 4)])
    traffic = copy_traffic(far, World(node=(0, 1, 1, 1, 1)), scatter=True)
    assert traffic.inter_out.tolist() == [1, 0, 0, 0, 0]
    assert traffic.intra_out == pytest.approx(np.array([0, 1, 2 / 3, 2 / 3, 2 / 3]))


def test_copies_of_several_experts_add_up() -> None:
    traffic = copy_traffic(HOMES.with_guests([(0, 1), (1, 0), (2, 3), (3, 2)]), ONE_NODE)
    assert traffic.intra_out.tolist() == traffic.intra_in.tolist() == [1, 1, 1, 1]


# a layer


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_layer_without_guests(microbatches: int) -> None:
    shape = dataclasses.replace(SHAPE, microbatches=microbatches)
    seconds = layer_seconds(_at_home(), HOMES, TWO_NODES, shape)
    assert seconds.experts == 28 * microbatches  # 14 tokens of 2 s
    assert seconds.all_to_all == 4 * 5.5 * microbatches  # dispatch and combine, forward and backward
    assert (seconds.exposed_copies, seconds.routing) == (0, 0)
    assert seconds.total == 50 * microbatches


def test_balanced_tokens_that_stay_cost_their_compute_alone() -> None:
    seconds = layer_seconds(_at_home(np.eye(4, dtype=int) * 25), HOMES, TWO_NODES, SHAPE)
    assert dataclasses.astuple(seconds) == (50.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("world", "hidden_seconds", "scatter", "exposed"),
    [
        (ONE_NODE, 0.0, False, 20.0),  # three chunks leave rank 0: 600 bytes + 1 s out, 1200 bytes + 1 s back
        (ONE_NODE, 5.0, False, 2.0 + 8.0),  # either way hides behind its own pass
        (ONE_NODE, 10.0, False, 3.0),
        (ONE_NODE, 13.0, False, 0.0),
        (ONE_NODE, 0.0, True, 3.0 + 5.0),  # one chunk on every link
        (TWO_NODES, 0.0, False, 12.0 + 22.0),  # 200 and 400 bytes at 2 x 10 bytes/s, 2 s each
        (TWO_NODES, 12.0, False, 10.0),
        (TWO_NODES, 1000.0, False, 0.0),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_copies_cost_what_cannot_hide(
    world: World, hidden_seconds: float, scatter: bool, exposed: float, microbatches: int
) -> None:
    shape = dataclasses.replace(SHAPE, hidden_seconds=hidden_seconds, microbatches=microbatches)
    quotas = split_quotas(np.array(TOKENS), EVERYWHERE, world)
    seconds = layer_seconds(quotas, EVERYWHERE, world, shape, scatter=scatter)
    assert seconds.exposed_copies == pytest.approx(exposed)  # once for all microbatches
    assert seconds.routing == 0.5 * microbatches
    late = layer_seconds(quotas, EVERYWHERE, world, shape, late=2, scatter=scatter)
    # on the critical path whatever hides, for every microbatch
    copy = 8 if world is ONE_NODE else 64
    assert late.exposed_copies == pytest.approx(exposed + 2 * microbatches * copy)
    assert late.total == late.experts + late.all_to_all + late.exposed_copies + late.routing
