"""Which transport moves experts, and what speaks against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from megatron_hecate import peers
from megatron_hecate.config import AUTO


@dataclasses.dataclass(frozen=True)
class Transport:
    """A choice: "p2p" or "sm"."""

    name: str

    def refusals(self, groups: Iterable[tuple[int, ...]], nodes: Sequence[str]) -> list[str]:
        """Why it cannot be in this job.

        Args:
            groups: ranks of every FSSDP group.
            nodes: the machine of every rank of the job.
        """
        if self.name != "sm":
            return []
        apart = [(group, sorted({nodes[rank] for rank in group})) for group in sorted(groups)]
        return [
            f"transport='sm' needs the ranks of an FSSDP group on one machine; those of {list(group)} are on "
            f"{', '.join(machines)}; use p2p"
            for group, machines in apart
            if len(machines) > 1
        ]


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
