"""Expert memory of a rank: what it is under stock expert parallelism, what guests add, and which lifetime fits.

A rank holds its homes (weights, main gradients, optimizer state) and, with FSSDP, slot memory, of which `memory.Frames`
knows the size. All of it is known when FSSDP is switched on, before DDP and the optimizer exist: so gradients are taken
to be fp32, and the optimizer to be Adam with its whole state on this rank. A distributed optimizer over several
replicas of the experts, offloading, or gradients in bf16 need less. All sizes are bytes.

Not counted: activations, and what the backward of one layer holds for a moment, the gradients of its homes and guests
in the weights' type, of at most so many experts as it has homes and slots (stock's grouped experts: of all homes; none
with gradient accumulation fusion).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_hecate.config import AUTO
from megatron_hecate.memory import LIFETIMES, Frames, Need

ASSUMED = "Adam, state not sharded"


@dataclasses.dataclass(frozen=True)
class RankExperts:
    """The experts of one rank, as far as memory depends on them.

    Args:
        needs: of slot memory, one per MoE layer.
        homes: experts that live on this rank, layer by layer.
        in_flight: as in `memory.Frames.of`.
        grad_bytes: of the main gradient of one parameter; 0 where experts are frozen.
        optimizer_bytes: of the optimizer's state of one parameter.
        transport: "p2p", "sm" or "ce".
    """

    needs: tuple[Need, ...]
    homes: tuple[int, ...]
    in_flight: int
    grad_bytes: int
    optimizer_bytes: int
    transport: str = "p2p"

    @classmethod
    def with_adam(
        cls, needs: tuple[Need, ...], homes: tuple[int, ...], *, in_flight: int, transport: str = "p2p"
    ) -> RankExperts:
        """fp32 gradients; two fp32 moments, and an fp32 master copy unless the weights are fp32."""
        master = 0 if needs[0].dtype is torch.float32 else 4
        return cls(needs, homes, in_flight, grad_bytes=4, optimizer_bytes=8 + master, transport=transport)


@dataclasses.dataclass(frozen=True)
class Account:
    """Expert memory of one rank with guests of one lifetime.

    Args:
        weights, grads, optimizer: of homes.
        guest_weights, guest_grads: of guests, with all slots in use.
        transport: where guests' gradients arrive at their home (``p2p``), or peers read lent experts and stripes wait
            between NVLink domains (``sm``, ``ce``).
    """

    weights: int
    grads: int
    optimizer: int
    guest_weights: int
    guest_grads: int
    transport: int

    @classmethod
    def of(cls, experts: RankExperts, lifetime: str) -> Account:
        frames = Frames.of(experts.needs, lifetime, in_flight=experts.in_flight, transport=experts.transport)
        parameters = [n.elements * homes for n, homes in zip(experts.needs, experts.homes, strict=True)]
        return cls(
            weights=sum(count * n.dtype.itemsize for n, count in zip(experts.needs, parameters, strict=True)),
            grads=sum(parameters) * experts.grad_bytes,
            optimizer=sum(parameters) * experts.optimizer_bytes,
            guest_weights=sum(frames.weights),
            guest_grads=sum(frames.grads),
            transport=frames.moved,
        )

    @property
    def homes(self) -> int:
        """Expert memory under stock expert parallelism."""
        return self.weights + self.grads + self.optimizer

    @property
    def guests(self) -> int:
        """What FSSDP adds: the slot memory."""
        return self.guest_weights + self.guest_grads + self.transport

    @property
    def total(self) -> int:
        return self.homes + self.guests

    @property
    def added(self) -> float:
        """What FSSDP adds, as a share of stock's expert memory."""
        return self.guests / self.homes

    def with_share_of_slots(self, share: float) -> Account:
        """The same with fewer slots; ``share`` is above 0."""
        weights, grads = int(self.guest_weights * share), int(self.guest_grads * share)
        return dataclasses.replace(self, guest_weights=weights, guest_grads=grads)

    @property
    def expected(self) -> int:
        """Bytes of the experts' that are not allocated yet at switch-on: all but the homes' weights."""
        return self.total - self.weights

    @property
    def certain(self) -> int:
        """Of those, what comes whatever the optimizer: slot memory, and gradients in the weights' type at least."""
        return self.guests + min(self.grads, self.weights)


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """What a rank tells the others of its memory.

    Args:
        accounts: by lifetime.
        free: bytes of its device that nobody uses yet.
    """

    accounts: Mapping[str, Account]
    free: int

    @classmethod
    def of(cls, experts: RankExperts, free: int) -> RankMemory:
        return cls({lifetime: Account.of(experts, lifetime) for lifetime in LIFETIMES}, free)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> RankMemory:
        """From what ``dataclasses.asdict`` made of it, through JSON."""
        return cls({name: Account(**account) for name, account in fields["accounts"].items()}, fields["free"])


def free_memory(*, gpu: bool, ranks_on_node: int) -> int:
    """Bytes this process can still allocate where its model lives; of a CPU's memory, each rank's part."""
    if gpu:
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # torch holds it for us
        return torch.cuda.mem_get_info()[0] + unused
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available // ranks_on_node


def choose(ranks: Mapping[int, RankMemory], lifetime: str) -> str:
    """The lifetime all ranks use: what was asked for, and for ``auto`` the fastest that is expected to fit on each.

    Where none is, it is the one that takes least; `refusal` says whether even that is too much.
    """
    if lifetime != AUTO:
        return lifetime
    for candidate in LIFETIMES:
        if all(memory.accounts[candidate].expected <= memory.free for memory in ranks.values()):
            return candidate
    return list(LIFETIMES)[-1]


def refusal(ranks: Mapping[int, RankMemory], lifetime: str, *, slots: int) -> str | None:
    """Why the guests cannot fit, with the settings under which they would; ``None`` when they can."""

    def fits(lifetime: str, count: int) -> bool:
        share = count / slots
        return all(m.accounts[lifetime].with_share_of_slots(share).certain <= m.free for m in ranks.values())

    if not slots or fits(lifetime, slots):
        return None
    worst = max(ranks, key=lambda r: ranks[r].accounts[lifetime].certain - ranks[r].free)
    memory = ranks[worst]
    account = memory.accounts[lifetime]
    others = [other for other in LIFETIMES if other != lifetime]
    ways = [f"lifetime={o!r} needs {size(memory.accounts[o].guests)}" for o in others if fits(o, slots)]
    fewer = range(slots - 1, 0, -1)
    ways += [f"use slots={count}" for count in fewer if fits(lifetime, count)][:1]
    ways = ways or [f"use slots={count} with lifetime={o!r}" for count in fewer for o in others if fits(o, count)][:1]
    return (
        f"slots={slots} with lifetime={lifetime!r} needs {size(account.guests)} for guests on rank {worst}, "
        f"{size(max(0, memory.free - account.certain + account.guests))} are free beside its homes' gradients; "
        + (", or ".join(ways) or "no other lifetime and no other slots fit: spread the experts over more ranks")
    )


def tables(ranks: Mapping[int, RankMemory], lifetime: str) -> str:
    """Every rank's expert memory as text. Ranks with the same figures share a table, with the least that is free."""
    alike: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        alike.setdefault(repr(sorted(ranks[rank].accounts.items())), []).append(rank)
    least = [(min(same, key=lambda rank: ranks[rank].free), same) for same in alike.values()]
    return "\n".join(table(ranks[rank], lifetime, ranks=same) for rank, same in least)


def table(memory: RankMemory, lifetime: str, *, ranks: Sequence[int]) -> str:
    """The expert memory of some ``ranks`` as text: the ``lifetime`` in use first, the others below it."""
    used = memory.accounts[lifetime]
    lines = [
        f"expert memory of rank {_named(ranks)}: homes {size(used.homes)} ({ASSUMED}: "
        f"weights {size(used.weights)}, gradients {size(used.grads)}, optimizer {size(used.optimizer)}); "
        f"{size(memory.free)} free now",
        f"  {'lifetime':<12}{'guests, weights':>17}{'gradients':>12}{'transport':>12}{'with homes':>12}",
    ]
    for name in sorted(LIFETIMES, key=lambda other: other != lifetime):
        a = memory.accounts[name]
        cells = f"{size(a.guest_weights):>17}{size(a.guest_grads):>12}{size(a.transport):>12}{size(a.total):>12}"
        lines.append(f"{'>' if name == lifetime else ' '} {name:<12}{cells} (+{a.added:.1%})")
    if used.expected > memory.free:
        lines.append(f"  {size(used.expected)} of this are to come, more than is free: it may run out of memory")
    return "\n".join(lines)


def _named(ranks: Sequence[int]) -> str:
    """Ascending ranks as text, runs of them as "0-7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def size(count: int) -> str:
    """``count`` bytes as text."""
    power = next((power for power in (3, 2) if count >= 1024**power), 1)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
