"""Self-test before training relies on a transport: one spAG and one spRS with known results."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_hecate.comm.agreement import collect, shorten
from megatron_hecate.comm.transport import Copy, LayerBuffer, TransferPlan, Transport, chunks_in
from megatron_hecate.faults.rendezvous import Question

# Elements of a chunk: several tiles for several thread blocks, and a tail that fills no vector.
ELEMENTS: int = 200_003
LABEL = "self-test of the transport"


def self_test(
    transport: Transport | None, device: torch.device, *, timeout: float
) -> tuple[list[str], bool]:
    """Test this rank's transport. Collective.

    Returns:
        Problems of all ranks, the same on all; False if a rank cannot continue, since a failed
        kernel destroys the CUDA context.
    """
    lines: list[str] = []
    is_usable = True
    with collect(lines):
        if transport is not None:
            _check_bytes(transport, device)
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            is_usable = False
            lines = lines or [str(error)]

    def sum_up(notes: list[Any]) -> list[Any]:
        listed, usable = zip(*notes, strict=True)
        return [shorten(itertools.chain.from_iterable(listed)), all(usable)]

    problems, usable = Question.next(timeout=timeout).ask([lines, is_usable], sum_up)
    if usable:
        return problems, True
    way_out = "restart with --moe-fssdp-transport p2p: CUDA is unusable after this error"
    return [f"{text}; {way_out}" for text in problems], False


def _ring(transport: Transport) -> tuple[TransferPlan, LayerBuffer]:
    """Plan copies of every rank's only expert to the next three ranks, or to all if fewer.

    The next ranks may be in the same NVLink domain or in others.
    """
    ranks = transport.group.size()
    slots = min(3, ranks - 1)
    copies: list[Copy] = []
    for home in range(ranks):
        copies += [Copy(home, 0, (home + 1 + i) % ranks, i) for i in range(slots)]
    copies.sort(key=lambda copy: (copy.home, copy.rank))
    layer = LayerBuffer(slots=slots, elements=ELEMENTS, dtype=torch.bfloat16, homes=1)
    return TransferPlan(transport.group.rank(), tuple(copies)), layer


def _check_bytes(transport: Transport, device: torch.device) -> None:
    """Check one spAG and one spRS. Collective.

    Raises:
        RuntimeError: this rank received wrong bytes.
    """
    plan, layer = _ring(transport)
    if not plan.copies:
        return
    memory = transport.allocate(layer.weight_bytes + layer.grad_bytes, [layer], device)
    weights = chunks_in(memory, layer.slots, ELEMENTS, layer.dtype)
    grads = chunks_in(memory[layer.weight_bytes :], layer.slots, ELEMENTS, layer.grad_dtype)
    numbers = _whole_numbers(plan.rank, device)
    transport.fetch(plan, [[numbers]], weights, label=LABEL).wait()
    differing = [
        home
        for slot, home in plan.receives
        if not torch.equal(weights[slot], _whole_numbers(home, device))
    ]
    # A rank with wrong weights takes part in the spRS as well: its peers would wait for it.
    # Sums of whole numbers are exact in fp32, so the order of summation does not matter.
    for slot, home in plan.receives:
        grads[slot].copy_(_whole_numbers(home, device).float() * (slot + 1))
    total = torch.zeros(ELEMENTS, device=device)
    gradients: Any = SimpleNamespace(
        main_grads=lambda index: [total], add=lambda index, grad: total.add_(grad)
    )
    transport.return_gradients(plan, grads, gradients, label=LABEL).wait()
    is_sum_right = torch.equal(total, numbers.float() * sum(range(1, layer.slots + 1)))
    if differing:
        raise RuntimeError(f"rank {plan.rank} received wrong weights from ranks {differing}")
    if not is_sum_right:
        raise RuntimeError(f"rank {plan.rank} received a wrong sum of its replicas' gradients")


def _whole_numbers(rank: int, device: torch.device) -> Tensor:
    """Return [elements] small whole numbers, different for every rank, bf16."""
    return ((torch.arange(ELEMENTS, device=device) * (2 * rank + 1) + rank) % 127).bfloat16()
