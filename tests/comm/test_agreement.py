"""What ranks tell each other. Oracle: literal messages."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.comm.agreement import Note, assert_same


@ranks(3)
def test_notes_are_compared() -> None:
    """Every rank raises the same error, which lists all that speaks against it."""
    rank = dist.get_rank()
    good = Note({"slots": 2}, [f"layer {rank}"] if rank else [], [], memory={"free": 10 * rank})
    assert [note.memory["free"] for note in good.agree(timeout=20.0)] == [0, 10, 20]
    bad = Note({"slots": 2 + (rank == 2)}, [], ["it is monday"] if rank == 1 else [])
    with pytest.raises(ValueError) as caught:
        bad.agree(timeout=20.0, find_problems=lambda notes: [f"{len(notes)} are too many"])
    assert str(caught.value) == (
        "FSSDP cannot be switched on:\n  - it is monday\n  - rank 2 has slots=3, rank 0 has slots=2\n"
        "  - the model has no MoE layer; set --num-experts, or leave --moe-fssdp off\n  - 3 are too many"
    )
    if rank:
        with pytest.raises(TimeoutError, match=rf"FSSDP: rank {rank} waited 0.5 s for ranks \[0\] to switch FSSDP on"):
            good.agree(timeout=0.5)
    dist.barrier()


@ranks(2)
def test_numbers_that_differ_are_named() -> None:
    assert_same(7, dist.group.WORLD, label="layer 1", timeout=20.0)
    with pytest.raises(AssertionError, match=r"layer 1: ranks of \[0, 1\] planned differently: \[0, -5\]"):
        assert_same(-5 * dist.get_rank(), dist.group.WORLD, label="layer 1", timeout=20.0)
