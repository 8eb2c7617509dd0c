"""Exceptions of single ranks, on all ranks. Oracle: literal messages, and a deadline."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.comm.agreement import collect, raise_on_all
from megatron_hecate.comm.collectives import TransferError, gather_objects
from megatron_hecate.faults import under_way

# Seconds: timeout where a rank is missing, timeout where none is, and the bound for both errors.
SHORT = 3.0
LONG = 60.0
SOON = 20.0


@pytest.mark.fast
def test_messages_name_the_subject_and_kinds_that_need_it() -> None:
    problems: list[str] = []
    with collect(problems, "layer 3"):
        raise ValueError("5 experts on 2 ranks")
    with collect(problems):
        raise KeyError("slots")
    with collect(problems, "speeds"):
        raise OSError
    with collect(problems):
        pass
    assert problems == ["layer 3: 5 experts on 2 ranks", "KeyError: 'slots'", "speeds: OSError"]
    with pytest.raises(KeyboardInterrupt), collect(problems):
        raise KeyboardInterrupt
    assert len(problems) == 3


@ranks(4, preload=None)
def test_one_rank_raises_and_all_ranks_name_it() -> None:
    rank = dist.get_rank()
    # Numbers in the group differ from numbers in the job.
    group = dist.new_group([1, 2, 3], timeout=timedelta(seconds=LONG))
    if rank == 0:
        return
    settings = {"what": "reading states", "label": "homes"}
    with raise_on_all(group, **settings):
        pass
    start = time.monotonic()
    message = r"^homes: rank 2: no moments$"
    with (
        pytest.raises(ValueError, match=message),
        raise_on_all(group, error=ValueError, **settings),
    ):
        if rank == 2:
            raise RuntimeError("no moments")
    assert time.monotonic() - start < SOON
    message = r"^homes: rank 1: KeyError: 1; rank 2: KeyError: 2; rank 3: KeyError: 3$"
    with pytest.raises(RuntimeError, match=message), raise_on_all(group, **settings):
        raise KeyError(rank)


@ranks(2, preload=None)
def test_a_missing_rank_is_an_error_that_names_the_action() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SHORT))
    settings = {"what": "reading states", "label": "homes"}
    own = {"rank": dist.get_rank(), "kinds": [["exp_avg", "torch.float32"]]}
    gathered = gather_objects(own, group, **settings)
    assert gathered == [{**own, "rank": rank} for rank in range(2)]
    if dist.get_rank() == 1:
        dist.barrier()
        return
    start = time.monotonic()
    message = (
        r"^homes: reading states failed on rank 0 of 2 after \d\.\d s: expected all of ranks "
        r"\[0, 1\] \(in the job\), one died, hangs, or did not take part\. Cause: "
    )
    with pytest.raises(TransferError, match=message), raise_on_all(group, **settings):
        pass
    assert SHORT / 2 < time.monotonic() - start < SOON
    assert under_way.describe() == "", "an ended call is not in flight"
    dist.barrier()
