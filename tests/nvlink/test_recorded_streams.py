"""Megatron trains with FSSDP as on GPUs (`gpu_on_cpu`); what it tells its streams is played through (`stream_order`).

Oracles: the same model without FSSDP, and CUDA's rules of streams. That the recording has what matters, and that the
simulator sees it, is shown by what must be found: transfers that nobody waits for, too few multiprocessors, and a rank
that begins two transfers in the other order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from ranks import ranks
from stream_order import Entry, Record, Recordings, Wait, Work, beside, crowds, hazards, play

pytestmark = pytest.mark.newest


def _fetches(work: Work) -> bool:
    return work.name.startswith("spAG")


def _returns(work: Work) -> bool:
    return work.name.startswith("spRS")


def _computes(work: Work) -> bool:
    return work.name in ("mm", "bmm")


def _without_waits_for_transfers(recordings: Recordings) -> Recordings:
    streams = {e.stream for entries in recordings for e in entries if _is_transfer(e)}
    events = {
        e.event
        for entries in recordings
        for e in entries
        if isinstance(e, Record) and e.stream in streams
    }
    return [
        [e for e in entries if not (isinstance(e, Wait) and e.event in events)]
        for entries in recordings
    ]


def _with_two_transfers_swapped(entries: Sequence[Entry]) -> list[Entry]:
    swapped = list(entries)
    first, second, *_ = (i for i, e in enumerate(swapped) if _is_transfer(e))
    swapped[first], swapped[second] = swapped[second], swapped[first]
    return swapped


def _is_transfer(entry: Any) -> bool:
    return isinstance(entry, Work) and (_fetches(entry) or _returns(entry))


@pytest.mark.parametrize(
    ("lifetime", "sms"),
    [("iteration", 16), pytest.param("layer", 132, marks=pytest.mark.slow)],
    ids=str,
)
@ranks(2, timeout=300)
def test_an_iteration(lifetime: str, sms: int) -> None:
    """Our kernels take fewer blocks on a GPU of fewer SMs (`sms`), where collectives need theirs as well."""
    import tiny_gpt

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    import gpu_on_cpu
    from stream_recording import Recording

    from megatron_hecate.comm import device as job_device
    from megatron_hecate.switch_on import connect

    driver = gpu_on_cpu.install(multiprocessors=sms)
    job_device.on_gpus = connect.on_gpus = lambda: True
    recording = Recording()
    ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(transport="nvlink", lifetime=lifetime))
    tiny_gpt.assert_trained_alike(stock, ours, lifetime, tolerance=1e-5)
    recording.begin(ours.chunks)
    ours.step(len(ours.losses))
    recordings: list[Any] = [None, None]
    dist.all_gather_object(recordings, recording.end())
    assert not driver.faults, driver.log
    if dist.get_rank() == 0:
        _check(recordings, sms=sms)


def _check(recordings: Recordings, *, sms: int) -> None:
    works = [entry for entries in recordings for entry in entries if isinstance(entry, Work)]
    assert any(map(_fetches, works)) and any(map(_returns, works)) and any(map(_computes, works))
    played = play(recordings)
    assert hazards(played) == [] and crowds(played, _is_transfer, sms=sms) == []
    assert hazards(play(_without_waits_for_transfers(recordings)))
    assert crowds(played, _is_transfer, sms=1)
    with pytest.raises(ValueError, match=r"ranks do not meet: rank 0 comes to .*; rank 1 comes to"):
        play([recordings[0], _with_two_transfers_swapped(recordings[1])])
    hidden = [bool(beside(one, played, _computes)) for one in played if _fetches(one.work)]
    assert sum(hidden) > len(hidden) / 2, "most fetches may run beside GEMMs"
