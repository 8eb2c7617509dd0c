"""The rivals' planners.

Oracles: dense quota tables rebuilt here with plain numpy (every expert has its home, quotas sum to the loads and only
name holders, slots respected where a planner says so), and small cases worked out by hand.
A rival that is wrong would lose, or win, a comparison it should not.
"""

from __future__ import annotations

import numpy as np
import pytest
from loads import EXPERTS, synthetic
from plan_cases import ROUND_SPEEDS
from rivals import find_planners
from rivals.eplb import balanced_packing, replicate_experts
from rivals.fill import Fill
from rivals.forced import ForcedBalance
from rivals.laer import _replicas
from rivals.llep import _spill
from rivals.planner import Setting
from rivals.score import score
from rivals.split import even_split

from megatron_hecate.plan import LayerShape, Placement, World
from megatron_hecate.tools.traffic import token_traffic

UNIT = LayerShape(expert_bytes=1, grad_bytes=2, token_bytes=1, token_flops=1.0)
ANY_NUMBER_OF_COPIES = {"llep"}  # as its docstring says


def setting(num_experts: int, node: tuple[int, ...], *, slots: int) -> Setting:
    return Setting(
        num_experts, world=World(node=node), shape=UNIT, slots=slots, tokens_per_count=20.0
    )


def assert_valid(planner, load: np.ndarray, placement: Placement, quotas) -> None:
    num_ranks, num_experts = load.shape
    dense = np.zeros((num_ranks, num_experts, num_ranks), dtype=np.int64)
    np.add.at(dense, (slice(None), quotas.expert, quotas.rank), quotas.tokens)
    assert np.issubdtype(quotas.tokens.dtype, np.integer)
    assert (dense >= 0).all()
    assert (dense.sum(axis=2) == load).all()
    assert not dense[:, ~placement.holders].any()
    assert placement.holders[np.arange(num_experts), placement.home].all()
    if planner.name not in ANY_NUMBER_OF_COPIES:
        most = num_experts // num_ranks + planner.setting.slots
        assert placement.holders.sum(axis=0).max() <= most


@pytest.mark.parametrize("name", find_planners())
@pytest.mark.parametrize(
    ("node", "slots"), [((0,) * 4 + (1,) * 4, 1), ((0,) * 4, 2), ((0, 1), 0)], ids=str
)
def test_every_plan_is_valid(name, node, slots) -> None:
    planner = find_planners()[name](setting(EXPERTS, node, slots=slots))
    loads = synthetic("domains", len(node), steps=55)[:, 0]
    loads[3] = 0  # no token at all
    loads[4, :, 1:] = 0  # one expert takes everything
    history: list[np.ndarray] = []
    for load in loads:
        placed = planner.place(history)
        gated = planner.gate(load)
        final = planner.correct(gated, placed)
        assert_valid(planner, gated, final, planner.split(gated, final))
        moves = planner.moves(placed, final)
        for part in (moves.early, moves.late, moves.grads, moves.state):
            assert part.intra_out.sum() == pytest.approx(part.intra_in.sum())
            assert part.inter_out.sum() == pytest.approx(part.inter_in.sum())
        history.append(load)


def test_even_split_prefers_rank_then_node() -> None:
    # expert 0 on ranks 0, 1, 2
    placement = Placement.initial(4, 4, num_slots=1).with_replicas([(0, 1), (0, 2)])
    load = np.zeros((4, 4), dtype=np.int64)
    load[:, 0] = [6, 6, 6, 6]
    world = World(node=(0, 0, 1, 1))
    expected = {
        "rank": [[6, 0, 0], [0, 6, 0], [0, 0, 6], [0, 0, 6]],
        "node": [[3, 3, 0], [3, 3, 0], [0, 0, 6], [0, 0, 6]],
        "any": [[2, 2, 2]] * 4,
    }
    for nearest, table in expected.items():
        assert even_split(load, placement, world, nearest=nearest).tokens[:, :3].tolist() == table
    # a remainder of 1 goes to another candidate for every source
    odd = even_split(load // 6, placement, world, nearest="any").tokens[:, :3]
    assert odd.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_eplb_packs_and_replicates_greedily() -> None:
    assert balanced_packing(np.array([5, 4, 3, 2, 1, 1]), 3).tolist() == [0, 1, 2, 2, 1, 0]
    assert replicate_experts(np.array([8, 4, 2, 2]), 6, most=4).tolist() == [3, 1, 1, 1]
    assert replicate_experts(np.array([8, 4, 2, 2]), 6, most=2).tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize(("piece", "expected"), [(1, [33, 23, 11, 33]), (30, [33, 34, 0, 33])])
def test_llep_spills_above_capacity_to_the_least_loaded(piece, expected) -> None:
    # mean 30, capacity 33. The home keeps 33; 67 go to rank 3 (33 fit), then to 1 and 2, where 23 fit beside their own
    served = _spill(np.array([100, 10, 10, 0]), np.arange(4), 4, piece)
    assert served[0].tolist() == expected


def test_laer_counts_replicas_by_load_per_replica() -> None:
    one_node, two_nodes = World(node=(0,) * 4), World(node=(0, 0, 1, 1))
    assert _replicas(np.array([12, 4, 2, 2]), one_node, 2).tolist() == [4, 2, 1, 1]
    # one per node fits (8 of 8); with 12, two more each to the two hottest
    assert _replicas(np.array([12, 4, 2, 2]), two_nodes, 2).tolist() == [2, 2, 2, 2]
    assert _replicas(np.array([12, 4, 2, 2]), two_nodes, 3).tolist() == [4, 4, 2, 2]


def test_fill_takes_load_per_holder_and_least_loaded_rank() -> None:
    planner = Fill(setting(4, (0,) * 4, slots=1))
    # loads 12, 4, 3, 1: expert 0 onto rank 3 (6 each), onto 2 (4 each), onto 1 (3 each); then expert 1 (4) onto rank 0
    placed = planner.place([np.array([[12, 4, 3, 1]])])
    ranks, slots = np.nonzero(placed.is_replica)
    experts = placed.table[ranks, slots]
    replicas = sorted(zip(experts.tolist(), ranks.tolist(), strict=True))
    assert replicas == [(0, 1), (0, 2), (0, 3), (1, 0)]


def test_forced_balance_keeps_every_sources_tokens() -> None:
    planner = ForcedBalance(setting(8, (0,) * 4, slots=0))
    load = planner.gate(np.array([[19, 0, 0, 0, 0, 0, 0, 2], [0, 21, 0, 0, 0, 0, 0, 0]] * 2))
    assert load.sum(axis=1).tolist() == [21] * 4
    assert load.max() - load.min() <= 1
    rank_load = load.sum(axis=0).reshape(4, 2).sum(axis=1)
    assert rank_load.max() - rank_load.min() <= 1


def test_a_step_adds_up() -> None:
    """Two nodes of two ranks at round speeds: 14 tokens of 2 s; 70 bytes at 2 x 10 bytes/s + 2 s, four times; and so
    on."""
    world = World((0, 0, 1, 1), speeds=ROUND_SPEEDS)
    shape = LayerShape(
        expert_bytes=200, grad_bytes=400, token_bytes=10, token_flops=4.0, hidden_seconds=12.0
    )
    load = np.array([[5, 3, 2, 0], [0, 5, 0, 5], [0, 0, 10, 0], [1, 0, 0, 9]])
    plan = find_planners()["ep"](Setting(4, world, shape, slots=1))
    homes = plan.place([])
    traffic = token_traffic(plan.split(load, homes).flow(world.num_ranks), world)
    assert traffic.intra_out.tolist() == [3, 0, 0, 0] and traffic.inter_out.tolist() == [2, 5, 0, 1]
    assert traffic.seconds(10, world) == 5.5
    bare = score(plan.split(load, homes), homes, plan.moves(homes, homes), plan.setting)
    assert bare.seconds == 3 * 12 + 14 * 2 + 4 * 5.5
    assert (bare.crossing, bare.imbalance) == (8 / 40, 1.4)
    # one copy crosses: 200 bytes at 20 bytes/s + 2 s hide, 400 do not
    placed = homes.with_replicas([(0, 1), (0, 2), (0, 3)])
    quotas = plan.split(load, placed)
    with_replicas = score(quotas, placed, plan.moves(placed, placed), plan.setting)
    # ranks 1 to 3 have one expert more: 1,200 bytes at 300 bytes/s + 3 s
    experts = max(2 * load + 7 * (r > 0) for r, load in enumerate(quotas.rank_load(4)))
    tokens = experts + 4 * token_traffic(quotas.flow(4), world).seconds(10, world)
    assert with_replicas.seconds == pytest.approx(3 * 12 + tokens + 0.5 + 10)
    assert (with_replicas.copies, with_replicas.extra) == (0.75, 1)
