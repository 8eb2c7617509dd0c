"""Expert memory of a rank: under stock expert parallelism, with replicas, and which lifetime fits.

A rank holds its homes (weights, main gradients, optimizer state) and, with FSSDP, the buffers of
replicas. The estimate is made when FSSDP is switched on, before DDP and the optimizer exist. It
assumes fp32 gradients and Adam with its whole state on this rank. A distributed optimizer over
several copies of the experts, offloading, or gradients in bf16 need less. All sizes are bytes.

Not counted: activations; with fp8 and fp4 the quantized copies of weights that are stored in bf16;
and temporary memory in the backward of a layer: gradients in the weights' type of at most all its
homes and slots (stock's grouped experts: of all homes; none with gradient accumulation fusion).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_hecate.comm.agreement import format_ranks
from megatron_hecate.comm.rank_0 import environment_number
from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.config import AUTO
from megatron_hecate.replicas.buffers import LIFETIMES, buffer_sizes

ASSUMED = "Adam, state not sharded"


@dataclasses.dataclass(frozen=True)
class ExpertMemory:
    """Expert memory of one rank with replicas of one lifetime, in bytes.

    Args:
        weights, grads, optimizer: memory of homes.
        replica_weights, replica_grads: memory of replicas, with all slots in use.
        transport: memory of the transport besides replicas, NCCL's connections included.
        connected: share of `transport` already allocated for NCCL's connections.
    """

    weights: int
    grads: int
    optimizer: int
    replica_weights: int
    replica_grads: int
    transport: int
    connected: int = 0

    @classmethod
    def estimate(
        cls,
        layers: Sequence[LayerBuffer],
        lifetime: str,
        *,
        transport_bytes: int = 0,
        nccl_bytes: int = 0,
        trained: float = 1.0,
    ) -> ExpertMemory:
        """Estimate the memory of experts that Adam trains, with main gradients like replicas'.

        Args:
            layers: sizes of every MoE layer of the rank.
            lifetime: lifetime of the replicas.
            transport_bytes: memory of the transport besides replicas.
            nccl_bytes: memory already allocated for the ranks' NCCL connections.
            trained: share of the parameters that are trained, and not frozen.
        """
        replica_weights, replica_grads = map(sum, buffer_sizes(layers, lifetime))
        parameters = sum(layer.elements * layer.homes for layer in layers)
        # Two fp32 moments, and an fp32 master copy unless the weights are fp32.
        optimizer_bytes = 8 if layers[0].dtype is torch.float32 else 12
        return cls(
            weights=sum(layer.homes * layer.chunk_bytes for layer in layers),
            grads=round(parameters * trained) * layers[0].grad_dtype.itemsize,
            optimizer=round(parameters * trained) * optimizer_bytes,
            replica_weights=replica_weights,
            replica_grads=replica_grads,
            transport=(transport_bytes if replica_weights else 0) + nccl_bytes,
            connected=nccl_bytes,
        )

    @property
    def homes(self) -> int:
        """Expert memory under stock expert parallelism."""
        return self.weights + self.grads + self.optimizer

    @property
    def replicas(self) -> int:
        """Memory that FSSDP adds."""
        return self.replica_weights + self.replica_grads + self.transport

    @property
    def total(self) -> int:
        return self.homes + self.replicas

    @property
    def added(self) -> float:
        """Memory that FSSDP adds, as a share of stock's expert memory."""
        return self.replicas / self.homes

    @property
    def expected(self) -> int:
        """Memory not allocated at switch-on: all but homes' weights and NCCL's connections."""
        return self.total - self.weights - self.connected

    @property
    def certain(self) -> int:
        """Lower bound of `expected`: replicas, and gradients in the weights' type."""
        return self.replicas - self.connected + min(self.grads, self.weights)


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, as gathered from all ranks.

    Args:
        by_lifetime: expert memory for each lifetime.
        free: free bytes of the rank's device.
    """

    by_lifetime: Mapping[str, ExpertMemory]
    free: int

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> RankMemory:
        """Restore a rank's memory from ``dataclasses.asdict`` of it, via JSON."""
        by_lifetime = {name: ExpertMemory(**m) for name, m in fields["by_lifetime"].items()}
        return cls(by_lifetime, fields["free"])

    def fits(self, lifetime: str, share: float = 1.0) -> bool:
        """Return whether the certain memory fits, with a ``share`` of the slots."""
        memory = self.by_lifetime[lifetime]
        saved = (memory.replica_weights + memory.replica_grads) * (1 - share)
        return memory.certain - saved <= self.free

    @staticmethod
    def free_memory(*, gpu: bool) -> int:
        """Return the bytes that this process can still allocate on its model's device.

        On a CPU the ranks of a host share its memory equally.
        """
        if gpu:
            # torch's allocator has reserved this memory for the process.
            cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return torch.cuda.mem_get_info()[0] + cached
        meminfo = Path("/proc/meminfo").read_text().splitlines()
        lines = dict(line.split(":", 1) for line in meminfo)
        available = int(lines["MemAvailable"].split()[0]) * 1024
        return available // environment_number("LOCAL_WORLD_SIZE")


@dataclasses.dataclass(frozen=True)
class JobMemory:
    """Memory of all ranks of a job that have MoE layers, by rank."""

    ranks: Mapping[int, RankMemory]

    def choose_lifetime(self, requested: str) -> str:
        """Choose the lifetime of all ranks: ``requested``; for ``auto`` the fastest to fit.

        If no lifetime is expected to fit on all ranks, the one with the least memory is chosen;
        `explain_too_large` reports whether even this one is certain to be too large.
        """
        if requested != AUTO:
            return requested
        memories = self.ranks.values()
        for candidate in LIFETIMES:
            if all(m.by_lifetime[candidate].expected <= m.free for m in memories):
                return candidate
        return list(LIFETIMES)[-1]

    def explain_too_large(self, lifetime: str, *, slots: int) -> str | None:
        """Explain why the replicas cannot fit, and list settings with which they would.

        Returns:
            ``None`` if the replicas may fit.
        """
        if not slots or self._fits(lifetime):
            return None
        fullest_rank = max(
            self.ranks,
            key=lambda r: self.ranks[r].by_lifetime[lifetime].certain - self.ranks[r].free,
        )
        memory = self.ranks[fullest_rank]
        requested = memory.by_lifetime[lifetime]
        free = max(0, memory.free - requested.certain + requested.replicas)
        alternatives = list(self._settings_that_fit(slots))
        way_out = f"use {', or '.join(alternatives)}"
        if not alternatives:
            way_out = "no other lifetime and no other slots fit: spread the experts over more ranks"
        return (
            f"slots={slots} with lifetime={lifetime!r} needs {_size(requested.replicas)} for "
            f"replicas on rank {fullest_rank}, {_size(free)} are free after its homes' gradients; "
            f"{way_out}"
        )

    def _fits(self, lifetime: str, share: float = 1.0) -> bool:
        return all(memory.fits(lifetime, share) for memory in self.ranks.values())

    def _settings_that_fit(self, slots: int) -> Iterator[str]:
        """Yield each lifetime with the largest number of slots that fits, if there is one."""
        for lifetime in LIFETIMES:
            for count in range(slots, 0, -1):
                if self._fits(lifetime, count / slots):
                    yield f"slots={count} with lifetime={lifetime!r}"
                    break

    def describe(self, lifetime: str) -> str:
        """Format every rank's expert memory as tables, the ``lifetime`` in use first.

        Ranks with equal figures share a table, which shows the least free memory of any rank.
        """
        same_figures: dict[str, list[int]] = {}
        for rank in sorted(self.ranks):
            figures = repr(sorted(self.ranks[rank].by_lifetime.items()))
            same_figures.setdefault(figures, []).append(rank)
        tables = []
        for ranks in same_figures.values():
            memory = min((self.ranks[rank] for rank in ranks), key=lambda memory: memory.free)
            tables.append(_format_table(memory, lifetime, ranks=ranks))
        return "\n".join(tables)


def _format_table(memory: RankMemory, lifetime: str, *, ranks: Sequence[int]) -> str:
    current = memory.by_lifetime[lifetime]
    lines = [
        f"expert memory of {format_ranks(ranks)}: homes {_size(current.homes)} ({ASSUMED}: "
        f"weights {_size(current.weights)}, gradients {_size(current.grads)}, "
        f"optimizer {_size(current.optimizer)}); {_size(memory.free)} free now",
        f"  {'lifetime':<12}{'replicas, weights':>17}{'gradients':>12}"
        f"{'transport':>12}{'with homes':>12}",
    ]
    for name in sorted(LIFETIMES, key=lambda name: name != lifetime):
        m = memory.by_lifetime[name]
        sizes = ((m.replica_weights, 17), (m.replica_grads, 12), (m.transport, 12), (m.total, 12))
        cells = "".join(f"{_size(size):>{width}}" for size, width in sizes)
        lines.append(f"{'>' if name == lifetime else ' '} {name:<12}{cells} (+{m.added:.1%})")
    if current.connected:
        lines.append(
            f"  transport: {_size(current.connected)} of it are NCCL's connections, which are "
            "allocated now"
        )
    released = current.replicas - current.connected
    lines.append(f"  megatron_hecate.release(model) frees {_size(released)} between two steps")
    if current.expected > memory.free:
        lines.append(
            f"  {_size(current.expected)} of this are not allocated yet, more than is free: the "
            "rank may run out of memory"
        )
    return "\n".join(lines)


def _size(count: int) -> str:
    """Format ``count`` bytes in KiB, MiB or GiB."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"
