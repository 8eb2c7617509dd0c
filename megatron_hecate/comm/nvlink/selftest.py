"""One spAG and one spRS before training relies on a transport: what is written must be read, and sums must be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_hecate.comm.agreement import Note
from megatron_hecate.comm.nvlink.launch import TransferKernels
from megatron_hecate.comm.nvlink.transport import NVLink
from megatron_hecate.comm.transfer import has_one_queue
from megatron_hecate.comm.transport import Copy, LayerBuffer, TransferPlan, Transport, chunks_in

ELEMENTS: int = 200_003  # of a chunk: a few tiles for a few blocks, and a tail
TIMED_ELEMENTS: int = 8 << 20  # of one whose fetch is timed
TIMED_FETCHES: int = 5
LABEL = "self-test of the transport"


def self_test(transports: Sequence[NVLink], device: torch.device, *, timeout: float) -> tuple[list[str], bool]:
    """Test this rank's transports, and choose who makes their copies. All ranks call at once.

    The copy engines do, where they move every byte, and faster on the slowest rank than our kernels on theirs.

    Returns:
        What goes wrong on any rank, the same on all; and whether all can go on: a kernel that fails ends its process's
        CUDA context.
    """
    results = _test(transports, device, timeout=timeout)
    if not any(result.problems for result in results) and all(result.copy_engines for result in results):
        by_kernels = max(result.seconds for result in results)
        for transport in transports:
            transport.copy_engines = True
        results = _test(transports, device, timeout=timeout)
        failed = any(result.problems for result in results)
        for transport in transports:
            transport.copy_engines = not failed and max(result.seconds for result in results) < by_kernels
        if failed and all(result.usable for result in results):
            return [], True
    problems = list(dict.fromkeys(text for result in results for text in result.problems))
    usable = all(result.usable for result in results)
    if not usable:
        end = "start again with --moe-fssdp-transport p2p: CUDA does not go on after this"
        problems = [f"{text}; {end}" for text in problems]
    return problems, usable


@dataclasses.dataclass(frozen=True)
class _Result(Note):
    """What a rank tells the others of its test: as problems, what went wrong.

    Args:
        usable: whether its device still takes work.
        copy_engines: whether they are worth a test.
        seconds: of a fetch, where they are.
    """

    usable: bool = True
    copy_engines: bool = False
    seconds: float = 0.0


def _test(transports: Sequence[Transport], device: torch.device, *, timeout: float) -> list[_Result]:
    """The results of all ranks."""
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
    result = _Result(problems=problems, usable=usable, copy_engines=copy_engines, seconds=seconds)
    return result.exchange(timeout=timeout)


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
    copies = [Copy(home, 0, (home + 1 + i) % ranks, i) for home in range(ranks) for i in range(slots)]
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
    wrong = [home for slot, home in plan.receives if not torch.equal(weights[slot], _whole_numbers(home, device))]
    if wrong:
        return f"rank {plan.rank} got other weights than ranks {wrong} sent"
    for slot, home in plan.receives:
        grads[slot].copy_(_whole_numbers(home, device).float() * (slot + 1))  # sums of whole numbers are exact
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
