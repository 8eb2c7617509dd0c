"""What ranks tell each other. Oracle: literal messages."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.comm.agreement import LISTED, Note, format_ranks


@ranks(3)
def test_notes_are_compared() -> None:
    """Every rank raises the same error, which lists all that speaks against it; rank 0 alone sees the notes."""
    rank = dist.get_rank()
    good = Note({"slots": 2}, [f"layer {rank}"] if rank else [], [], memory={"free": 10 * rank})
    decided, notes = good.agree(
        timeout=20.0, judge=lambda notes: ([], max(note.memory["free"] for note in notes))
    )
    assert decided == 20 and [note.memory["free"] for note in notes] == (
        [] if rank else [0, 10, 20]
    )
    bad = Note({"slots": 2 + (rank == 2)}, [], ["it is monday"] if rank == 1 else [])
    with pytest.raises(ValueError) as caught:
        bad.agree(timeout=20.0, judge=lambda notes: ([f"{len(notes)} are too many"], None))
    assert str(caught.value) == (
        "FSSDP cannot be switched on:\n  - it is monday (rank 1)\n  - rank 2 has slots=3, rank 0 has slots=2\n"
        "  - the model has no MoE layer; set --num-experts, or leave --moe-fssdp off\n  - 3 are too many"
    )


@ranks(3)
def test_many_problems_are_counted() -> None:
    """So that what all ranks of a large job read stays small; ranks with the same settings share a line."""
    rank = dist.get_rank()
    problems = [f"problem {rank}: {i}" for i in range(40)]
    bad = Note({"slots": 2 + min(rank, 1)}, ["layer 1"], problems)
    with pytest.raises(ValueError) as caught:
        bad.agree(timeout=20.0)
    lines = [f"  - problem {r}: {i} (rank {r})" for r in range(3) for i in range(40)]
    assert str(caught.value).splitlines()[1:] == [*lines[:LISTED], f"  - and {121 - LISTED} more"]
    with pytest.raises(ValueError, match=r"  - ranks 1-2 have slots=3, rank 0 has slots=2$"):
        Note(bad.settings, bad.layers).agree(timeout=20.0)
    # so is a line: with expert parallelism every 8th rank may have the same problem
    numbers = range(1, 16_384, 8)
    assert format_ranks(numbers) == "ranks 1, 9, 17, 25, 33, 41, 49, 57, ... (2048 in all)"
    assert format_ranks([3, 4, 5, 9], "layer") == "layers 3-5, 9" and format_ranks([0]) == "rank 0"
