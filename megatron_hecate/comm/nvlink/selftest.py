"""One spAG and one spRS before training relies on a transport: what is written must be read, and sums must be right."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_hecate.comm.nvlink.launch import TransferKernels
from megatron_hecate.comm.nvlink.transport import NVLink
from megatron_hecate.comm.transfer import has_one_queue
from megatron_hecate.comm.transport import Copy, LayerBuffer, TransferPlan, Transport, chunks_in
from megatron_hecate.job.agreement import shorten
from megatron_hecate.job.rendezvous import Question, Verdict

ELEMENTS: int = 200_003  # of a chunk: a few tiles for a few blocks, and a tail
TIMED_ELEMENTS: int = 8 << 20  # of one whose fetch is timed
TIMED_FETCHES: int = 5
LABEL = "self-test of the transport"


def self_test(
    transports: Sequence[NVLink], device: torch.device, *, timeout: float
) -> tuple[list[str], bool, float | None]:
    """Test this rank's transports, and try copy engines. All ranks call at once.

    Returns:
        What goes wrong on any rank, the same on all; whether all can go on: a kernel that fails ends its process's CUDA
        context; and by how many seconds copies by copy engines are slower on this rank than by our kernels on the
        slowest, infinitely where bytes were wrong, ``None`` where they were not tried.
    """

    def sum_up(told: list[Any]) -> Verdict:
        return Verdict(dataclasses.asdict(_Result.of_all([_Result(**fields) for fields in told])))

    own = dataclasses.asdict(_test(transports, device))
    result = _Result(**Question.next(timeout=timeout).ask(own, sum_up).job)
    slower = None
    if not result.problems and result.copy_engines:
        for transport in transports:
            transport.copy_engines = True
        tried = _test(transports, device)
        for transport in transports:
            transport.copy_engines = False
        slower = math.inf if tried.problems else tried.seconds - result.seconds
        if not tried.usable:
            result = tried
    if result.usable:
        return result.problems, True, slower
    end = "start again with --moe-fssdp-transport p2p: CUDA does not go on after this"
    return [f"{text}; {end}" for text in result.problems], False, slower


@dataclasses.dataclass(frozen=True)
class _Result:
    """What a rank tells of its test, and what rank 0 makes of those of all.

    Args:
        problems: what went wrong.
        usable: whether its device still takes work.
        copy_engines: whether they are worth a test.
        seconds: of a fetch, where they are.
    """

    problems: list[str]
    usable: bool
    copy_engines: bool
    seconds: float

    @classmethod
    def of_all(cls, results: Sequence[_Result]) -> _Result:
        """All problems, and the seconds of the slowest rank."""
        return cls(
            problems=shorten(text for result in results for text in result.problems),
            usable=all(result.usable for result in results),
            copy_engines=all(result.copy_engines for result in results),
            seconds=max(result.seconds for result in results),
        )


def _test(transports: Sequence[Transport], device: torch.device) -> _Result:
    """The result of this rank."""
    problems: list[str] = []
    usable, copy_engines, seconds = True, _can_use_copy_engines(device), 0.0
    for transport in transports:
        try:
            if problem := _wrong_bytes(transport, device):
                problems.append(problem)
            elif copy_engines:
                seconds += _fetch_seconds(transport, device)
        except Exception as error:  # every rank must hear of it, whatever it is
            problems.append(str(error) or type(error).__name__)
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            usable = False
    return _Result(problems, usable, copy_engines, seconds)


def _can_use_copy_engines(device: torch.device) -> bool:
    return device.type == "cuda" and not has_one_queue() and TransferKernels.can_batch_copies()


class _Total:
    """The gradient of this rank's only expert."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.grad = torch.zeros(elements, device=device)

    def main_grads(self, index: int) -> list[Tensor]:
        return [self.grad]

    def add(self, index: int, total: Tensor) -> None:
        self.grad += total


def _ring(transport: Transport, elements: int) -> tuple[TransferPlan, LayerBuffer]:
    """Every rank's only expert has replicas on the next ranks, of its NVLink domain and of others; up to three."""
    ranks = transport.group.size()
    slots = min(3, ranks - 1)
    copies = [
        Copy(home, 0, (home + 1 + i) % ranks, i) for home in range(ranks) for i in range(slots)
    ]
    copies.sort(key=lambda copy: (copy.home, copy.rank))
    layer = LayerBuffer(slots=slots, elements=elements, dtype=torch.bfloat16, homes=1)
    return TransferPlan(transport.group.rank(), tuple(copies)), layer


def _wrong_bytes(transport: Transport, device: torch.device) -> str:
    """What goes wrong in one spAG and one spRS; empty when all is well. All ranks of the group call at once."""
    plan, layer = _ring(transport, ELEMENTS)
    if not plan.copies:
        return ""
    memory = transport.allocate(layer.weight_bytes + layer.grad_bytes, [layer], device)
    weights = chunks_in(memory, layer.slots, ELEMENTS, layer.dtype)
    grads = chunks_in(memory[layer.weight_bytes :], layer.slots, ELEMENTS, layer.grad_dtype)
    own = _whole_numbers(plan.rank, device)
    transport.fetch(plan, [[own]], weights, label=LABEL).wait()
    wrong = [
        home
        for slot, home in plan.receives
        if not torch.equal(weights[slot], _whole_numbers(home, device))
    ]
    if wrong:
        return f"rank {plan.rank} got other weights than ranks {wrong} sent"
    for slot, home in plan.receives:
        grads[slot].copy_(
            _whole_numbers(home, device).float() * (slot + 1)
        )  # sums of whole numbers are exact
    total = _Total(ELEMENTS, device)
    transport.return_gradients(plan, grads, total, label=LABEL).wait()
    if not torch.equal(total.grad, own.float() * sum(range(1, layer.slots + 1))):
        return f"rank {plan.rank} got another sum than its replicas' gradients have"
    return ""


def _fetch_seconds(transport: Transport, device: torch.device) -> float:
    """How long a spAG of large chunks takes, at best. All ranks of the group call at once."""
    plan, layer = _ring(transport, TIMED_ELEMENTS)
    if not plan.copies:
        return 0.0
    memory = transport.allocate(layer.weight_bytes, [layer], device)
    weights = chunks_in(memory, layer.slots, TIMED_ELEMENTS, layer.dtype)
    own = torch.zeros(TIMED_ELEMENTS, dtype=layer.dtype, device=device)
    seconds = []
    for _ in range(TIMED_FETCHES):
        transfer = transport.fetch(plan, [[own]], weights, label=LABEL, timed=True)
        transfer.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(transfer.seconds or 0.0)
    return min(seconds)


def _whole_numbers(rank: int, device: torch.device) -> Tensor:
    """[elements] small whole numbers, others for every rank."""
    return ((torch.arange(ELEMENTS, device=device) * (2 * rank + 1) + rank) % 127).bfloat16()
