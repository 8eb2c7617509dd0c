"""Expert memory of a rank: what it is under stock expert parallelism, what replicas add, and which lifetime fits.

A rank holds its homes (weights, main gradients, optimizer state) and, with FSSDP, the buffers of replicas. All of it is
known when FSSDP is switched on, before DDP and the optimizer exist. So gradients are taken to be fp32, and the
optimizer to be Adam with its whole state on this rank. A distributed optimizer over several copies of the experts,
offloading, or gradients in bf16 need less. All sizes are bytes.

Not counted: activations; in fp8 and fp4 the quantized copies of weights that are stored in bf16; and what the backward
of one layer holds for a moment, the gradients of its homes and replicas in the weights' type, of at most so many
experts as it has homes and slots (stock's grouped experts: of all homes; none with gradient accumulation fusion).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.config import AUTO
from megatron_hecate.job.agreement import format_ranks
from megatron_hecate.replicas.buffers import LIFETIMES, BufferSizes

ASSUMED = "Adam, state not sharded"


@dataclasses.dataclass(frozen=True)
class RankExperts:
    """The experts of one rank, as far as memory depends on them.

    Args:
        layers: sizes of every MoE layer.
        in_flight: as in `BufferSizes.plan`.
        grad_bytes: of the main gradient of one parameter; 0 where experts are frozen.
        optimizer_bytes: of the optimizer's state of one parameter.
        transport_bytes: what the transport needs beside replicas.
        nccl_bytes: what NCCL's connections of the ranks have taken already.
    """

    layers: tuple[LayerBuffer, ...]
    in_flight: int
    grad_bytes: int
    optimizer_bytes: int
    transport_bytes: int = 0
    nccl_bytes: int = 0

    @classmethod
    def with_adam(
        cls,
        layers: tuple[LayerBuffer, ...],
        *,
        in_flight: int,
        transport_bytes: int = 0,
        nccl_bytes: int = 0,
    ) -> RankExperts:
        """fp32 gradients; two fp32 moments, and an fp32 master copy unless the weights are fp32."""
        master = 0 if layers[0].dtype is torch.float32 else 4
        beside = dict(transport_bytes=transport_bytes, nccl_bytes=nccl_bytes)
        return cls(layers, in_flight, grad_bytes=4, optimizer_bytes=8 + master, **beside)

    def for_record(self, config: Any, lifetime: str) -> dict[str, float]:
        """`RunInfo.memory`, with Megatron's ``config`` of the layers. Linears keep their inputs, an activation its own
        and, unless it is fused, what is between its steps. What quantization keeps is not counted."""
        memory = dataclasses.asdict(ExpertMemory.estimate(self, lifetime))
        selective = (
            config.recompute_modules or [] if config.recompute_granularity == "selective" else []
        )
        again = config.recompute_granularity == "full" or "moe" in selective
        ffn = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
        gated = bool(config.gated_linear_unit)
        steps = (
            0 if "moe_act" in selective else 1 if config.bias_activation_fusion else 2 + 2 * gated
        )
        width = (getattr(config, "moe_latent_size", None) or config.hidden_size) + (
            1 + gated + steps
        ) * ffn
        kept = 0 if again else self.in_flight / len(self.layers)
        return {**memory, "token": width * self.layers[0].dtype.itemsize, "kept": kept}


@dataclasses.dataclass(frozen=True)
class ExpertMemory:
    """Expert memory of one rank with replicas of one lifetime.

    Args:
        weights, grads, optimizer: of homes.
        replica_weights, replica_grads: of replicas, with all slots in use.
        transport: what it needs beside them, connections of NCCL among it.
        connected: of that, what those connections have taken by now.
    """

    weights: int
    grads: int
    optimizer: int
    replica_weights: int
    replica_grads: int
    transport: int
    connected: int = 0

    @classmethod
    def estimate(cls, experts: RankExperts, lifetime: str) -> ExpertMemory:
        sizes = BufferSizes.plan(experts.layers, lifetime, in_flight=experts.in_flight)
        parameters = [layer.elements * layer.homes for layer in experts.layers]
        return cls(
            weights=sum(layer.homes * layer.chunk_bytes for layer in experts.layers),
            grads=sum(parameters) * experts.grad_bytes,
            optimizer=sum(parameters) * experts.optimizer_bytes,
            replica_weights=sum(sizes.weights),
            replica_grads=sum(sizes.grads),
            transport=(experts.transport_bytes if sizes.total else 0) + experts.nccl_bytes,
            connected=experts.nccl_bytes,
        )

    @property
    def homes(self) -> int:
        """Expert memory under stock expert parallelism."""
        return self.weights + self.grads + self.optimizer

    @property
    def replicas(self) -> int:
        """What FSSDP adds."""
        return self.replica_weights + self.replica_grads + self.transport

    @property
    def total(self) -> int:
        return self.homes + self.replicas

    @property
    def added(self) -> float:
        """What FSSDP adds, as a share of stock's expert memory."""
        return self.replicas / self.homes

    def with_share_of_slots(self, share: float) -> ExpertMemory:
        """The same with fewer slots; ``share`` is above 0."""
        weights, grads = int(self.replica_weights * share), int(self.replica_grads * share)
        return dataclasses.replace(self, replica_weights=weights, replica_grads=grads)

    @property
    def expected(self) -> int:
        """Bytes of the experts' that are not allocated yet at switch-on: all but the homes' weights and connections."""
        return self.total - self.weights - self.connected

    @property
    def certain(self) -> int:
        """Of those, what comes whatever the optimizer: replicas, and gradients in the weights' type at least."""
        return self.replicas - self.connected + min(self.grads, self.weights)


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """What a rank tells the others of its memory.

    Args:
        by_lifetime: its expert memory.
        free: bytes of its device that nobody uses yet.
    """

    by_lifetime: Mapping[str, ExpertMemory]
    free: int

    @classmethod
    def estimate(cls, experts: RankExperts, free: int) -> RankMemory:
        return cls(
            {lifetime: ExpertMemory.estimate(experts, lifetime) for lifetime in LIFETIMES}, free
        )

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> RankMemory:
        """From what ``dataclasses.asdict`` made of it, through JSON."""
        return cls(
            {name: ExpertMemory(**memory) for name, memory in fields["by_lifetime"].items()},
            fields["free"],
        )

    def fits(self, lifetime: str, share: float = 1.0) -> bool:
        """Whether what is certain to come, with a ``share`` of the slots, does."""
        return self.by_lifetime[lifetime].with_share_of_slots(share).certain <= self.free

    @staticmethod
    def free_memory(*, gpu: bool) -> int:
        """Bytes this process can still allocate where its model lives; of a CPU's memory, each rank's part."""
        if gpu:
            unused = (
                torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            )  # torch holds it for us
            return torch.cuda.mem_get_info()[0] + unused
        meminfo = Path("/proc/meminfo")
        if meminfo.exists():
            lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
            available = int(lines["MemAvailable"].split()[0]) * 1024
        else:
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@dataclasses.dataclass(frozen=True)
class JobMemory:
    """The memory of all ranks of a job that have MoE layers, by rank."""

    ranks: Mapping[int, RankMemory]

    def choose_lifetime(self, asked: str) -> str:
        """The lifetime all ranks use: what was asked for, and for ``auto`` the fastest that is expected to fit on each.

        Where none is, it is the one that takes least; `explain_too_large` says whether even that is too much.
        """
        if asked != AUTO:
            return asked
        for candidate in LIFETIMES:
            if all(
                memory.by_lifetime[candidate].expected <= memory.free
                for memory in self.ranks.values()
            ):
                return candidate
        return list(LIFETIMES)[-1]

    def explain_too_large(self, lifetime: str, *, slots: int) -> str | None:
        """Why the replicas cannot fit, with the settings under which they would; ``None`` when they can."""

        def fits(lifetime: str, count: int) -> bool:
            return all(memory.fits(lifetime, count / slots) for memory in self.ranks.values())

        if not slots or fits(lifetime, slots):
            return None
        worst = max(
            self.ranks,
            key=lambda r: self.ranks[r].by_lifetime[lifetime].certain - self.ranks[r].free,
        )
        memory = self.ranks[worst]
        asked = memory.by_lifetime[lifetime]
        free = max(0, memory.free - asked.certain + asked.replicas)
        others = [o for o in LIFETIMES if o != lifetime]
        ways = [
            f"lifetime={o!r} needs {_size(memory.by_lifetime[o].replicas)}"
            for o in others
            if fits(o, slots)
        ]
        fewer = range(slots - 1, 0, -1)
        ways += [f"use slots={count}" for count in fewer if fits(lifetime, count)][:1]
        ways = (
            ways
            or [f"use slots={n} with lifetime={o!r}" for n in fewer for o in others if fits(o, n)][
                :1
            ]
        )
        return (
            f"slots={slots} with lifetime={lifetime!r} needs {_size(asked.replicas)} for replicas on rank {worst}, "
            f"{_size(free)} are free beside its homes' gradients; "
            + (
                ", or ".join(ways)
                or "no other lifetime and no other slots fit: spread the experts over more ranks"
            )
        )

    def describe(self, lifetime: str) -> str:
        """Every rank's expert memory as a table: the ``lifetime`` in use first, the others below it. Ranks with the
        same figures share a table, with the least that is free."""
        alike: dict[str, list[int]] = {}
        for rank in sorted(self.ranks):
            alike.setdefault(repr(sorted(self.ranks[rank].by_lifetime.items())), []).append(rank)
        least = [
            (min(same, key=lambda rank: self.ranks[rank].free), same) for same in alike.values()
        ]
        return "\n".join(
            _format_table(self.ranks[rank], lifetime, ranks=same) for rank, same in least
        )


def _format_table(memory: RankMemory, lifetime: str, *, ranks: Sequence[int]) -> str:
    used = memory.by_lifetime[lifetime]
    lines = [
        f"expert memory of rank {format_ranks(ranks)}: homes {_size(used.homes)} ({ASSUMED}: "
        f"weights {_size(used.weights)}, gradients {_size(used.grads)}, "
        f"optimizer {_size(used.optimizer)}); {_size(memory.free)} free now",
        f"  {'lifetime':<12}{'replicas, weights':>17}{'gradients':>12}{'transport':>12}{'with homes':>12}",
    ]
    for name in sorted(LIFETIMES, key=lambda other: other != lifetime):
        m = memory.by_lifetime[name]
        sizes = ((m.replica_weights, 17), (m.replica_grads, 12), (m.transport, 12), (m.total, 12))
        cells = "".join(f"{_size(size):>{width}}" for size, width in sizes)
        lines.append(f"{'>' if name == lifetime else ' '} {name:<12}{cells} (+{m.added:.1%})")
    if used.connected:
        lines.append(
            f"  transport: {_size(used.connected)} of it are NCCL's connections, which are allocated now"
        )
    if used.expected > memory.free:
        lines.append(
            f"  {_size(used.expected)} of this are to come, more than is free: it may run out of memory"
        )
    return "\n".join(lines)


def _size(count: int) -> str:
    """``count`` bytes as text."""
    power = next((power for power in (3, 2) if count >= 1024**power), 1)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
