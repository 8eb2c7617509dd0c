"""Which transport moves experts, and what speaks against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megatron_hecate import peers
from megatron_hecate.agreement import Note
from megatron_hecate.config import AUTO


@dataclasses.dataclass(frozen=True)
class Transport:
    """A choice: "p2p" or "sm"."""

    name: str

    def refusals(self, notes: Sequence[Note], guests: Mapping[int, int]) -> list[str]:
        """Why it cannot be in this job.

        Args:
            notes: of all ranks, by rank.
            guests: bytes of slot memory of the ranks that have some.
        """
        if self.name != "sm":
            return []
        nodes = [note.node for note in notes]
        groups = sorted({tuple(group) for note in notes for group in note.groups})
        apart = [(group, sorted({nodes[rank] for rank in group})) for group in groups]
        problems = [
            f"transport='sm' needs the ranks of an FSSDP group on one machine; those of {list(group)} are on "
            f"{', '.join(machines)}; use p2p"
            for group, machines in apart
            if len(machines) > 1
        ]
        for node in sorted({nodes[rank] for rank in guests}):
            ranks = [rank for rank in guests if nodes[rank] == node]
            needed = sum(guests[rank] + peers.COUNTERS for rank in ranks)
            free = min(notes[rank].shared for rank in ranks)
            if needed > free:
                problems.append(
                    f"transport='sm' needs {needed} bytes of shared memory on {node}, {free} are free in "
                    f"{peers.SHARED}; make it larger, or use p2p, fewer slots or a shorter lifetime"
                )
        return problems


def choose_transport(asked: str, problems: list[str]) -> Transport:
    """The transport that ``asked`` (`HecateConfig.transport`) means here; compiles what it needs.

    Args:
        problems: gets what speaks against it on this rank.
    """
    if asked == "sm":
        try:
            if "nccl" in str(dist.get_backend_config()):
                raise RuntimeError("it has not run on GPUs yet; use p2p")
            peers.compile_for_host()
        except (RuntimeError, OSError) as error:
            problems.append(f"transport='sm': {error}")
    return Transport("p2p" if asked == AUTO else asked)
