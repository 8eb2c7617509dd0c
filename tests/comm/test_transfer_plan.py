"""What a transfer plan says of a placement.

Oracle: literal plans; loops over the placement's own table, slot by slot.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from plan_cases import some_homes, some_replicas
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


def _copies(placement: Placement) -> list[Copy]:
    """Every replica, by expert, then rank: own experts and replica slots are counted from 0 on every rank."""
    copies = []
    for rank, row in enumerate(placement.table.tolist()):
        slots = [e for e in row if e == EMPTY or placement.home[e] != rank]
        for slot, expert in enumerate(slots):
            if expert != EMPTY:
                home = int(placement.home[expert])
                homes = [
                    e
                    for e in placement.table[home].tolist()
                    if e != EMPTY and placement.home[e] == home
                ]
                copies.append((expert, Copy(home, homes.index(expert), rank, slot)))
    return [copy for _, copy in sorted(copies, key=lambda pair: (pair[0], pair[1].rank))]


@seeds(60)
def test_random_placements(seed: int) -> None:
    """Every rank derives the same copies; what is late is what the earlier placement lacks. Of any two ranks, what one
    sends to the other is what that receives, in the same order and rounds."""
    rng = np.random.default_rng(seed)
    homes = some_homes(rng, most_ranks=8, most_experts=(2, 24)[seed % 2])
    homes_first = np.argsort(homes.table == EMPTY, axis=1, kind="stable")
    table = np.take_along_axis(homes.table, homes_first, axis=1)
    homes = Placement(home=homes.home.copy(), table=table)
    placement = some_replicas(rng, homes, share=rng.choice([0.5, 1.0]))
    rank_of_slot = np.arange(placement.num_ranks)[:, None]
    drop = (placement.table != EMPTY) & (placement.home[placement.table] != rank_of_slot)
    table = np.where(drop & (rng.random(placement.table.shape) < 0.5), EMPTY, placement.table)
    before = Placement(home=placement.home.copy(), table=table)
    expected, early = _copies(placement), _copies(before)
    ranks = range(placement.num_ranks)
    plans = [TransferPlan.from_placement(placement, rank) for rank in ranks]
    for rank, plan in enumerate(plans):
        earlier = TransferPlan.from_placement(before, rank)
        assert (plan.rank, plan.copies, earlier.copies) == (rank, tuple(expected), tuple(early))
        assert all(type(number) is int for copy in plan.copies for number in copy), (
            "no numpy integers in errors"
        )
        assert plan.without(earlier).copies == tuple(copy for copy in expected if copy not in early)
        assert earlier.without(plan).copies == ()
    for home, rank in itertools.product(ranks, repeat=2):
        sent = [(turn, index) for turn, (index, to) in enumerate(plans[home].sends) if to == rank]
        receives = zip(plans[rank].turns, plans[rank].receives, strict=True)
        received = [(turn, slot) for turn, (slot, sender) in receives if sender == home]
        assert [turn for turn, _ in sent] == [turn for turn, _ in received]
        chunks = [(index, slot) for (_, index), (_, slot) in zip(sent, received, strict=True)]
        copies = [copy for copy in expected if (copy.home, copy.rank) == (home, rank)]
        assert chunks == [(copy.index, copy.slot) for copy in copies]


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
