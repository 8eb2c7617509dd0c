"""The transports of a rank, as `connect` sets them up."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from megatron_hecate.comm import device
from megatron_hecate.comm.transport import Transport
from megatron_hecate.nvlink.peer_memory import COUNTERS, SHARED
from megatron_hecate.nvlink.transport import NVLink

Group = tuple[int, ...]  # ranks of the job, ascending


@dataclasses.dataclass(frozen=True, eq=False)
class Connection:
    """The transports of this rank, and the measurements of their setup.

    Args:
        name: name of the transport in use.
        why: short reason for the choice of "auto"; else empty.
        nodes: node number of each rank of a group, for every FSSDP group of this rank.
        transports: transport of every FSSDP group of this rank; empty if there are problems.
        machines: on rank 0, host name and free bytes of shared memory of every rank of the job;
            empty on other ranks.
        exposed: on rank 0, explanation of transfers that compute waits for, with the way out; empty
            where none are known at setup.
        nccl_bytes: bytes of this rank's GPU that NCCL took to connect the ranks.
    """

    name: str
    why: str
    nodes: Mapping[Group, tuple[int, ...]]
    transports: Mapping[Group, Transport]
    machines: Sequence[tuple[str, int]] = ()
    exposed: str = ""
    nccl_bytes: int = 0

    def shared_memory_problems(self, replica_bytes: Mapping[int, int]) -> list[str]:
        """Return an error for every node with too little shared memory for its CPU ranks. Rank 0.

        Args:
            replica_bytes: bytes of the buffers of replicas and of the transport, for every rank
                that has replicas.
        """
        if self.name != NVLink.name or device.on_gpus():
            return []
        num_bytes: Counter[str] = Counter()
        free: dict[str, int] = {}
        for rank, size in replica_bytes.items():
            node, free_bytes = self.machines[rank]
            num_bytes[node] += size + COUNTERS
            free[node] = min(free.get(node, free_bytes), free_bytes)
        return [
            f"transport={self.name!r} needs {num_bytes[node]} bytes of shared memory on {node}, "
            f"{free[node]} are free in {SHARED}; make it larger, or use p2p, fewer slots or a "
            "shorter lifetime"
            for node in sorted(num_bytes)
            if num_bytes[node] > free[node]
        ]
