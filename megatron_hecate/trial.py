"""Settles on a transport; one by our kernels is tried before training relies on it: what is written must be read."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_hecate.agreement import exchange
from megatron_hecate.collectives import Fused, Route, start_gather, start_reduce
from megatron_hecate.config import AUTO
from megatron_hecate.memory import Need, SlotMemory
from megatron_hecate.schedule import Loan
from megatron_hecate.transports import (
    FUSED,
    TransferGroups,
    Transport,
    Whereabouts,
    choose_transport,
    device_of_rank,
    fused,
    transfer_groups,
)

ELEMENTS: int = 200_003  # of a chunk: a few tiles for a few blocks, and a tail
NO_ROUTE = Route((), (), (), ())


def settle(
    asked: str, groups: list[tuple[int, ...]], problems: list[str], *, timeout: float
) -> tuple[list[Whereabouts], Transport, dict[tuple[int, ...], TransferGroups]]:
    """Where all ranks are, the transport that they use, and its process groups, by their ranks. All ranks call at once.

    Args:
        asked: `HecateConfig.transport`.
        groups: the FSSDP groups that this rank is in.
        problems: that it knows of; gets what speaks against what was ``asked``. Any on any rank: no process groups.
        timeout: seconds per wait.

    Raises:
        TimeoutError: naming the ranks that did not come in time.
    """
    here = Whereabouts.here(asked, groups, sound=not problems)
    ranks = [Whereabouts(**record) for record in exchange(dataclasses.asdict(here), timeout=timeout)]
    transport, against = choose_transport(asked, ranks)
    problems += against
    if against or not all(rank.sound and rank.asked == asked for rank in ranks):
        return ranks, transport, {}
    transfers = transfer_groups(transport, ranks, timeout=timeout)
    if transport.name not in FUSED:
        return ranks, transport, transfers
    device = device_of_rank()
    found = [problem(transport, own, device, timeout=timeout) for own in transfers.values()]
    outcome = {"found": [text for text in found if text], "alive": _alive(device)}
    every = exchange(outcome, timeout=timeout)
    failed = list(dict.fromkeys(text for one in every for text in one["found"]))
    alive = all(one["alive"] for one in every)
    if not alive:
        failed = [
            f"{text}; start again with --moe-fssdp-transport p2p: CUDA does not go on after this" for text in failed
        ]
    if failed and asked == AUTO and alive:
        transport = Transport("p2p", f"{transport.name} failed its trial: {'; '.join(failed)}")
    elif failed:
        problems += [f"transport={asked!r} failed its trial: {text}" for text in failed]
    return ranks, transport, transfers


def problem(transport: Transport, groups: TransferGroups, device: torch.device, *, timeout: float) -> str:
    """What goes wrong in one spAG and one spRS; empty when all is well. All ranks of the group call at once.

    Every rank lends a chunk to the next ranks, as many as have slots for it: those of its domain and of others.
    """
    ranks, rank = groups.everyone.size(), groups.everyone.rank()
    slots = min(3, ranks - 1)
    need = Need(slots=slots, elements=ELEMENTS, dtype=torch.bfloat16, homes=1, domains=groups.sizes)
    try:
        memory = SlotMemory(
            [need],
            "layer",
            in_flight=1,
            device=device,
            fused=lambda size: fused(transport.name, groups, size, device),
        )
        return _moves(memory, rank, ranks, timeout) if slots else ""
    except Exception as error:  # every rank must hear of it, whatever it is
        return str(error) or type(error).__name__


def _alive(device: torch.device) -> bool:
    """Whether the GPU still takes work: a kernel that fails ends its process's context."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True


def _moves(memory: SlotMemory, rank: int, ranks: int, timeout: float) -> str:
    (need,) = memory.needs
    loans = [Loan(r, 0, (r + 1 + i) % ranks, i) for r in range(ranks) for i in range(need.slots)]
    lenders = {loan.guest: loan.home for loan in loans if loan.host == rank}
    weights = memory.weights(0, label="trial").chunks(need.slots, need.elements, need.dtype)
    grads = memory.grads(0).chunks(need.slots, need.elements, need.grad_dtype)
    device = weights[0].device
    outbox = memory.outbox.chunks(1, need.elements, need.dtype)
    settings = dict(label="trial of the transport", timeout=timeout)

    def using(rows: list[Tensor]) -> Fused:
        return Fused(memory.sm, loans, rows, outbox, memory.relays(need, rows[0].dtype))

    group, homes = memory.sm.group, [[_chunk(rank, device)]]
    start_gather(homes, NO_ROUTE, [], group, fused=using(weights), **settings).wait()
    wrong = [home for guest, home in lenders.items() if not torch.equal(weights[guest], _chunk(home, device))]
    if wrong:
        return f"rank {rank} got other weights than ranks {wrong} sent"
    total = torch.zeros(need.elements, device=device)
    for guest, home in lenders.items():
        grads[guest].copy_(_chunk(home, device).float() * (guest + 1))  # whole numbers: sums are exact
    reduced = start_reduce(
        [], NO_ROUTE, [], lambda *_: None, group, fused=using(grads), totals=lambda home: [total], **settings
    )
    reduced.wait()
    if not torch.equal(total, homes[0][0].float() * sum(range(1, need.slots + 1))):
        return f"rank {rank} got another sum than its hosts' gradients have"
    return ""


def _chunk(rank: int, device: torch.device) -> Tensor:
    """[elements] small whole numbers, others for every rank."""
    return ((torch.arange(ELEMENTS, device=device) * (2 * rank + 1) + rank) % 127).bfloat16()
