"""What a transfer plan says of a placement.

Oracle: literal plans; loops over the placement's own table, slot by slot.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from seeds import seeds

from megatron_hecate.comm.transport import ALIGNMENT, Copy, LayerBuffer, TransferPlan, chunks_in
from megatron_hecate.plan import EMPTY, Placement

pytestmark = pytest.mark.fast


def _plans(homes: Placement, replicas: list[tuple[int, int]]) -> list[TransferPlan]:
    placement = homes.with_replicas(replicas)
    return [TransferPlan.from_placement(placement, rank) for rank in range(placement.num_ranks)]


def test_a_small_plan() -> None:
    """Experts 0 and 1 have their home on rank 0, 2 and 3 on rank 1, 4 and 5 on rank 2."""
    homes = Placement.initial(6, 3, num_slots=2)
    plans = _plans(homes, [(5, 0), (1, 2), (1, 1), (0, 2)])
    expected = (Copy(0, 0, 2, 1), Copy(0, 1, 1, 0), Copy(0, 1, 2, 0), Copy(2, 1, 0, 0))
    assert all(plan.copies == expected for plan in plans), "by expert, then rank"
    assert plans[0].sends == ((0, 2), (1, 1), (1, 2)) and plans[0].receives == ((0, 2),)
    assert plans[0].replicated == (0, 1) and plans[1].replicated == ()
    assert plans[2].receives == ((1, 0), (0, 0)) and plans[2].slots == (0, 1)
    assert plans[2].turns == (0, 2), "rank 1's copy of expert 1 goes between them"
    late = [
        plan.without(earlier)
        for plan, earlier in zip(plans, _plans(homes, [(5, 0), (1, 2)]), strict=True)
    ]
    assert all(plan.copies == (Copy(0, 0, 2, 1), Copy(0, 1, 1, 0)) for plan in late)
    assert late[2].receives == ((1, 0),) and late[2].turns == (0,)


@seeds(20)
def test_both_ends_of_a_copy_agree(seed: int) -> None:
    """Of any two ranks, what one sends to the other is what that receives, in the same order and rounds."""
    rng = np.random.default_rng(seed)
    homes = Placement.initial(12, 4, num_slots=5)
    away = [(e, r) for e in range(12) for r in range(4) if homes.home[e] != r]
    drawn, room = [], [5] * 4
    for e, r in (away[i] for i in rng.permutation(len(away))):
        if room[r] and rng.random() < 0.6:
            room[r] -= 1
            drawn.append((e, r))
    placement = homes.with_replicas(drawn)
    plans = [TransferPlan.from_placement(placement, rank) for rank in range(4)]
    for home in range(4):
        for rank in range(4):
            sent = [
                (turn, home * 3 + index)
                for turn, (index, to) in enumerate(plans[home].sends)
                if to == rank
            ]
            pairs = zip(plans[rank].receives, plans[rank].turns, strict=True)
            assert sent == [
                (turn, placement.table[rank, 3 + slot]) for (slot, at), turn in pairs if at == home
            ]


def _placement(rng: np.random.Generator, *, one_expert: bool) -> Placement:
    """Ranks with 0 to 4 homes each, in any order, then 0 to 4 free slots, any of which hold replicas.

    Args:
        rng: of what is drawn.
        one_expert: whether only one expert has replicas, one on every rank with a slot.
    """
    num_ranks = int(rng.integers(2, 9))
    homes = rng.integers(0, 5, num_ranks)
    homes[rng.integers(num_ranks)] += 1  # there is at least one expert
    experts = iter(rng.permutation(homes.sum()).tolist())
    home, table = np.empty(homes.sum(), np.int64), np.full((num_ranks, 10), EMPTY)
    for rank in range(num_ranks):
        for at in range(homes[rank]):
            table[rank, at] = next(experts)
            home[table[rank, at]] = rank
    share, only = rng.choice([0.0, 0.5, 1.0]), int(rng.integers(len(home)))
    for rank in range(num_ranks):
        away = [e for e in rng.permutation(len(home)).tolist() if home[e] != rank]
        if one_expert:
            away, share = [only] if home[only] != rank else [], 1.0
        for at in range(homes[rank], homes[rank] + rng.integers(0, 5)):
            if away and rng.random() < share:  # else the slot is empty, also before others
                table[rank, at] = away.pop()
    return Placement(home=home, table=table)


def _copies(placement: Placement) -> list[Copy]:
    """Every replica, by expert, then rank: own experts and replica slots are counted from 0 on every rank."""
    table, found = placement.table.tolist(), []
    for expert, home in enumerate(placement.home.tolist()):
        for rank in range(len(table)):
            slots_before = 0
            for held in table[rank]:
                is_home = held != EMPTY and placement.home[held] == rank
                if held == expert and not is_home:
                    index = [
                        e for e in table[home] if e != EMPTY and placement.home[e] == home
                    ].index(expert)
                    found.append(Copy(home, index, rank, slots_before))
                slots_before += not is_home
    return found


@pytest.mark.parametrize("one_expert", [False, True], ids=["any", "of one expert"])
@seeds(30)
def test_random_placements(seed: int, one_expert: bool) -> None:
    """Every rank derives the same copies; what is late is what the earlier placement lacks."""
    rng = np.random.default_rng(seed)
    placement = _placement(rng, one_expert=one_expert)
    drop = np.array(
        [
            [e != EMPTY and placement.home[e] != r for e in row]
            for r, row in enumerate(placement.table)
        ]
    )
    table = np.where(drop & (rng.random(placement.table.shape) < 0.5), EMPTY, placement.table)
    before = Placement(home=placement.home.copy(), table=table)
    expected, early = _copies(placement), _copies(before)
    for rank in range(placement.num_ranks):
        plan, earlier = (
            TransferPlan.from_placement(placement, rank),
            TransferPlan.from_placement(before, rank),
        )
        assert (plan.rank, plan.copies, earlier.copies) == (rank, tuple(expected), tuple(early))
        assert all(type(number) is int for copy in plan.copies for number in copy), (
            "no numpy integers in errors"
        )
        assert plan.without(earlier).copies == tuple(copy for copy in expected if copy not in early)
        assert earlier.without(plan).copies == ()


def test_chunks_lie_aligned_and_apart() -> None:
    layer = LayerBuffer(slots=3, elements=100, dtype=torch.bfloat16, homes=2)
    assert layer.grad_dtype is torch.float32
    assert (layer.weight_bytes, layer.grad_bytes) == (3 * ALIGNMENT, 3 * 2 * ALIGNMENT)
    memory = torch.zeros(ALIGNMENT + layer.grad_bytes, dtype=torch.uint8)
    chunks = chunks_in(memory[ALIGNMENT:], 3, 100, layer.grad_dtype)
    for number, chunk in enumerate(chunks, 1):
        assert (
            chunk.shape == (100,)
            and chunk.data_ptr() % LayerBuffer.aligned(1, torch.uint8)
            == memory.data_ptr() % ALIGNMENT
        )
        version = chunk._version
        chunks_in(memory[ALIGNMENT:], 3, 100, layer.grad_dtype)[number - 1].fill_(number)
        assert chunk._version == version, "autograd must not see that a slot is filled again"
    assert [chunk.tolist() for chunk in chunks] == [[float(number)] * 100 for number in (1, 2, 3)]
