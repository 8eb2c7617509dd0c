"""Which transport moves experts, between which ranks, and what speaks against it."""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hecate import launch
from megatron_hecate.config import AUTO
from megatron_hecate.hierarchy import Domains
from megatron_hecate.peers import COUNTERS, SHARED, Peers, free_shared
from megatron_hecate.schedule import MAX_RANKS
from megatron_hecate.sm import Sm

FUSED = ("sm", "ce")  # transports by our kernels


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """What a rank tells the others before they choose a transport.

    Args:
        asked: `HecateConfig.transport`; settings are compared later, but ranks must choose alike to get there.
        groups: ranks of the FSSDP groups it is in.
        node: name of the machine it runs on.
        domain: name of its NVLink domain; CPU ranks of one machine are one.
        against: why our kernels cannot run on this rank.
        slower: why they should not, unless asked for.
        shared: bytes of shared memory that are free on its machine.
        sound: whether it knows of no problem so far.
    """

    asked: str
    groups: list[tuple[int, ...]]
    node: str
    domain: str
    against: str
    slower: str
    shared: int
    sound: bool

    @classmethod
    def here(cls, asked: str, groups: list[tuple[int, ...]], *, sound: bool) -> Whereabouts:
        """Of this rank; compiles what the transport ``asked`` for needs."""
        node = socket.gethostname()
        domain, against, slower = node, "", "CPU ranks have no NVLink"
        try:
            device = device_of_rank()
            if device.type == "cuda" and asked != "p2p":
                domain, slower = _nvlink_domain(node)
            if asked in FUSED or (asked == AUTO and not slower):
                launch.prepare(device)
                if asked == "ce" and device.type == "cuda":
                    _need_batched_copies()
        except Exception as error:  # every rank must hear of it, whatever it is
            against = f"{node}: {error or type(error).__name__}"
        return cls(asked, groups, node, domain, against, slower, free_shared(), sound)


@dataclasses.dataclass(frozen=True)
class Transport:
    """A choice.

    Args:
        name: "p2p", "sm" or "ce".
        why: in a few words, where it chose itself.
    """

    name: str
    why: str = ""

    def refusals(self, ranks: Sequence[Whereabouts], guests: Mapping[int, int]) -> list[str]:
        """Why the memory of CPU ranks does not suffice for it.

        Args:
            ranks: all, by rank.
            guests: bytes of slot memory of the ranks that have some.
        """
        if self.name not in FUSED or on_gpus():
            return []
        problems = []
        for node in sorted({ranks[rank].node for rank in guests}):
            here = [rank for rank in guests if ranks[rank].node == node]
            needed = sum(guests[rank] + COUNTERS for rank in here)
            free = min(ranks[rank].shared for rank in here)
            if needed > free:
                problems.append(
                    f"transport={self.name!r} needs {needed} bytes of shared memory on {node}, {free} are free in "
                    f"{SHARED}; make it larger, or use p2p, fewer slots or a shorter lifetime"
                )
        return problems


def choose_transport(asked: str, ranks: Sequence[Whereabouts]) -> tuple[Transport, list[str]]:
    """The transport that ``asked`` (`HecateConfig.transport`) means, and why it cannot be: the same on all ranks."""
    if asked == "p2p" or len({rank.asked for rank in ranks}) > 1:
        return Transport("p2p"), []
    domains = [group for whole in all_groups(ranks) for group in domains_of(whole, ranks)]
    too_large = [f"{len(d)} ranks share a domain, {MAX_RANKS} may" for d in domains if len(d) > MAX_RANKS]
    against = [*dict.fromkeys(rank.against for rank in ranks if rank.against), *too_large]
    if asked in FUSED:
        return Transport(asked), [f"transport={asked!r}: {text}" for text in against]
    against += dict.fromkeys(rank.slower for rank in ranks if rank.slower)
    if all(len(domain) == 1 for domain in domains):
        against.append("no two ranks of a group share an NVLink domain")
    if against:
        return Transport("p2p", "; ".join(against)), []
    return Transport("sm", "peers share NVLink, and a trial moved every byte"), []


def all_groups(ranks: Sequence[Whereabouts]) -> list[tuple[int, ...]]:
    """The FSSDP groups of a job."""
    return sorted({tuple(group) for rank in ranks for group in rank.groups})


def domains_of(group: Sequence[int], ranks: Sequence[Whereabouts]) -> list[tuple[int, ...]]:
    """The ranks of ``group`` by NVLink domain, in the order of their first rank."""
    by_domain: dict[str, list[int]] = {}
    for rank in group:
        by_domain.setdefault(ranks[rank].domain, []).append(rank)
    return [tuple(domain) for domain in by_domain.values()]


@dataclasses.dataclass(frozen=True, eq=False)
class TransferGroups:
    """The process groups by which one FSSDP group moves experts: its own, so that copies do not queue behind tokens.

    Args:
        everyone: all its ranks.
        domains: its NVLink domains, in ranks of ``everyone``.
        domain: the ranks of this rank's, for transports by our kernels.
    """

    everyone: dist.ProcessGroup
    domains: Domains
    domain: dist.ProcessGroup | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the domains."""
        return tuple(map(len, self.domains))


def transfer_groups(
    transport: Transport, ranks: Sequence[Whereabouts], *, timeout: float
) -> dict[tuple[int, ...], TransferGroups]:
    """Those of every FSSDP group of the job that this rank is in. All ranks call, and make all process groups."""
    limit = timedelta(seconds=max(timeout, 1.0))
    make = functools.partial(dist.new_group, timeout=limit)
    made = {}
    for group in all_groups(ranks):
        everyone, own = make(list(group), group_desc="fssdp transfers"), None
        domains = domains_of(group, ranks)
        for domain in domains if transport.name in FUSED else []:
            of_domain = everyone if len(domains) == 1 else make(list(domain), group_desc="fssdp domain")
            own = of_domain if dist.get_rank() in domain else own
        if dist.get_rank() in group:
            numbers = tuple(tuple(group.index(rank) for rank in domain) for domain in domains)
            made[group] = TransferGroups(everyone, numbers, own)
    for groups in made.values():  # NCCL connects ranks when a group is first used, by all of them; copies are by some
        dist.all_reduce(torch.zeros(1, device=device_of_rank()), group=groups.everyone)
    return made


def fused(name: str, groups: TransferGroups, size: int, device: torch.device) -> Sm:
    """Transport ``name``, by our kernels, with an arena of ``size`` bytes. All ranks of the group call at once."""
    assert groups.domain is not None
    own = next(domain for domain in groups.domains if groups.everyone.rank() in domain)
    peers = Peers(groups.domain, size, device, ranks=own)
    return Sm(peers, groups.everyone, groups.domains, copy_engines=name == "ce")


def on_gpus() -> bool:
    """Whether this job trains on GPUs."""
    return "nccl" in str(dist.get_backend_config())


def device_of_rank() -> torch.device:
    """Where this rank trains."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus() else torch.device("cpu")


def _nvlink_domain(node: str) -> tuple[str, str]:
    """The name of this GPU's NVLink domain, and why it has none.

    Machines that share an NVLink fabric (GB200 NVL72) are one domain; the driver knows its name.
    """
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity

    own, count = torch.cuda.current_device(), torch.cuda.device_count()
    if count > 1:
        links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[own]
        without = [other for other in range(count) if other != own and not links[other]]
        if without:
            return node, f"GPU {own} of {node} has no NVLink to GPUs {without}"
    return _fabric() or node, ""  # a process that sees one GPU cannot look; the trial shows what works


def _fabric() -> str:
    """The NVLink fabric that this GPU shares with other machines; empty without one, or where nothing can say so."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        info = nvml.device_get_gpu_fabric_info_v(nvml.device_get_handle_by_uuid(uuid))
        cluster = bytes(info.cluster_uuid)
    except Exception:  # of NVML's own kinds as well: older GPUs and drivers cannot say
        return ""
    completed = int(info.state) == int(nvml.GpuFabricState.COMPLETED)
    return f"fabric {cluster.hex()} {info.clique_id}" if completed and any(cluster) else ""


def _need_batched_copies() -> None:
    from cuda.bindings import driver

    status, version = driver.cuDriverGetVersion()
    if int(status) or version < 12080 or not hasattr(driver, "cuMemcpyBatchAsync"):
        raise RuntimeError(f"ce needs CUDA 12.8 for batches of copies, the driver has {version}; use sm or p2p")
