"""Which transport moves experts between which ranks; one by our kernels is tested before training relies on it."""

from __future__ import annotations

import dataclasses
import functools
import socket
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from megatron_hecate.comm.nvlink.launch import TransferKernels
from megatron_hecate.comm.nvlink.peers import COUNTERS, SHARED, Peers
from megatron_hecate.comm.nvlink.schedule import MAX_RANKS
from megatron_hecate.comm.nvlink.selftest import self_test
from megatron_hecate.comm.nvlink.transport import NVLink
from megatron_hecate.comm.overlap import explain_exposed
from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transfer import has_one_queue
from megatron_hecate.comm.transport import Transport
from megatron_hecate.config import AUTO
from megatron_hecate.job.agreement import shorten
from megatron_hecate.job.device import device_of_rank, on_gpus
from megatron_hecate.job.groups import connect_ranks, new_group
from megatron_hecate.job.nccl import DEFAULT_CTAS, NcclSettings
from megatron_hecate.job.rendezvous import Question, Verdict

Group = tuple[int, ...]  # ranks of the job, ascending


@dataclasses.dataclass(frozen=True, eq=False)
class Connection:
    """How the ranks of the job move experts.

    Args:
        name: of the transport in use.
        why: in a few words, where "auto" chose.
        nodes: by the ranks of each FSSDP group that this rank is in, the numbers of their machines.
        transports: by the same; empty when there are problems.
        machines: on rank 0, of every rank of the job the machine's name and the bytes of shared memory that are free
            on it; elsewhere empty.
        slower_by_engines: seconds that a fetch by copy engines takes longer on this rank than one by our kernels on the
            slowest; ``None`` where they were not tried.
        exposed: on rank 0, what computing waits for, and the way out, where that can be known now.
        nccl_bytes: of this rank's GPU that went to NCCL when it connected the ranks.
    """

    name: str
    why: str
    nodes: Mapping[Group, tuple[int, ...]]
    transports: Mapping[Group, Transport]
    machines: Sequence[tuple[str, int]] = ()
    slower_by_engines: float | None = None
    exposed: str = ""
    nccl_bytes: int = 0

    @staticmethod
    def engines_pay(slower_by_engines: Iterable[float | None]) -> bool:
        """Whether copy engines are faster on the slowest rank of the job, from what every rank's connection says."""
        return all(seconds is not None and seconds < 0 for seconds in slower_by_engines)

    def choose_copy_engines(self, chosen: bool) -> None:
        """Have them make the copies, or our kernels; the same on all ranks."""
        for transport in self.transports.values():
            if isinstance(transport, NVLink):
                transport.copy_engines = chosen

    def shared_memory_problems(self, replica_bytes: Mapping[int, int]) -> list[str]:
        """On rank 0: why the memory of CPU ranks does not suffice for the transport.

        Args:
            replica_bytes: of the ranks that have replicas: their buffers, and what the transport needs beside.
        """
        if self.name != NVLink.name or on_gpus():
            return []
        needed: Counter[str] = Counter()
        free: dict[str, int] = {}
        for rank, size in replica_bytes.items():
            node, here = self.machines[rank]
            needed[node] += size + COUNTERS
            free[node] = min(free.get(node, here), here)
        return [
            f"transport={self.name!r} needs {needed[node]} bytes of shared memory on {node}, {free[node]} are free in "
            f"{SHARED}; make it larger, or use p2p, fewer slots or a shorter lifetime"
            for node in sorted(needed)
            if needed[node] > free[node]
        ]


def connect(
    asked: str,
    groups: Sequence[Group],
    problems: list[str],
    *,
    timeout: float,
    nccl_ctas: int = DEFAULT_CTAS,
) -> Connection:
    """Choose a transport, the same on all ranks of the job, and set it up. All ranks call at once.

    Args:
        asked: "auto", "p2p" or "nvlink".
        groups: the FSSDP groups that this rank is in.
        problems: that it knows of; gets what speaks against what was ``asked``. Any on any rank: no transports.
        timeout: seconds per wait.
        nccl_ctas: as `NcclSettings.max_ctas`.

    Raises:
        TimeoutError: naming the ranks that did not come in time.
    """
    sites: list[_Site] = []  # of all ranks, on rank 0

    def judge(told: list[Any]) -> Verdict:
        sites.extend(_Site(**fields) for fields in told)
        return _judge(sites)

    site = _Site.of_this_rank(asked, groups, problems)
    names = {group: _name_of(group) for group in sorted(groups)}
    verdict = Question.next(timeout=timeout).ask(
        dataclasses.asdict(site), judge, groups=list(names.values())
    )
    name, why = verdict.job["name"], verdict.job["why"]
    problems += verdict.job["against"]
    machines = [(other.node, other.shared_memory) for other in sites]
    if not verdict.job["go on"]:
        return Connection(name, why, {}, {}, machines)
    parts = {group: verdict.groups[of_group] for group, of_group in names.items()}
    nodes = {group: tuple(part["nodes"]) for group, part in parts.items()}
    free = _free_bytes()
    nccl = (
        NcclSettings(nccl_ctas, pairs=name == P2P.name or verdict.job["across"])
        if on_gpus()
        else None
    )
    can_time = not verdict.job["one queue"]
    transports = _make_transports(name, parts, timeout=timeout, nccl=nccl, can_time=can_time)
    nccl_bytes = free - _free_bytes()
    failed, usable, slower = list[str](), True, None
    if name == NVLink.name:
        tested = [transport for transport in transports.values() if isinstance(transport, NVLink)]
        failed, usable, slower = self_test(tested, device_of_rank(), timeout=timeout)
    if failed and asked == AUTO and usable:
        why = f"{name} failed its self-test: {'; '.join(failed)}"
        name = P2P.name
        settings: dict[str, Any] = dict(timeout=timeout, can_time=can_time)
        transports = {group: P2P(old.group, **settings) for group, old in transports.items()}
        if nccl is not None and not nccl.pairs:
            free, all_pairs = _free_bytes(), dataclasses.replace(nccl, pairs=True)
            for transport in transports.values():
                connect_ranks(transport.group, all_pairs, label="fssdp transfers", timeout=timeout)
            nccl_bytes += free - _free_bytes()
    elif failed:
        problems += [f"transport={asked!r} failed its self-test: {text}" for text in failed]
        transports = {}
    exposed = (
        explain_exposed(name, across_domains=verdict.job["across"])
        if sites and verdict.job["one queue"]
        else ""
    )
    return Connection(name, why, nodes, transports, machines, slower, exposed, max(0, nccl_bytes))


def _free_bytes() -> int:
    """Bytes of this rank's GPU that are free, once it has done what it was asked to; 0 on CPU ranks."""
    if not on_gpus():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@dataclasses.dataclass(frozen=True)
class _Site:
    """What a rank tells before a transport is chosen.

    Args:
        asked: which one it was asked for.
        has_problems: whether it knows of any.
        groups: names of the FSSDP groups that it is in.
        first_of: the ranks of those of them whose first rank it is: so that each is told once.
        process_groups: in how many it is.
        node: name of the machine it runs on.
        domain: name of its NVLink domain; CPU ranks of one machine are one.
        unable: why our kernels cannot run on this rank.
        slower: why they should not, unless asked for.
        shared_memory: bytes that are free on its machine.
        one_queue: as in `transfer.has_one_queue`.
    """

    asked: str
    has_problems: bool = False
    groups: Sequence[str] = ()
    first_of: Sequence[Sequence[int]] = ()
    process_groups: int = 0
    node: str = ""
    domain: str = ""
    unable: str = ""
    slower: str = ""
    shared_memory: int = 0
    one_queue: bool = False

    @classmethod
    def of_this_rank(cls, asked: str, groups: Sequence[Group], problems: list[str]) -> _Site:
        """Compiles what the transport ``asked`` for needs."""
        node = socket.gethostname()
        domain, unable, slower = node, "", "CPU ranks have no NVLink"
        try:
            device = device_of_rank()
            if device.type == "cuda" and asked != P2P.name:
                domain, slower = Peers.nvlink_domain(node)
                if problem := Peers.symmetric_problem(device):
                    unable = f"{node} cannot have {problem}"
            if not unable and (asked == NVLink.name or (asked == AUTO and not slower)):
                TransferKernels(device)
        except Exception as error:  # every rank must hear of it, whatever it is
            unable = f"{node}: {error or type(error).__name__}"
        return cls(
            asked=asked,
            has_problems=bool(problems),
            groups=[_name_of(group) for group in groups],
            first_of=[group for group in groups if group[0] == dist.get_rank()],
            process_groups=len(_world.pg_names),
            node=node,
            domain=domain,
            unable=unable,
            slower=slower,
            shared_memory=Peers.free_bytes(),
            one_queue=on_gpus() and has_one_queue(),
        )


def _judge(sites: Sequence[_Site]) -> Verdict:
    """Rank 0: the transport, what speaks against it, and what the ranks of each FSSDP group need to make theirs."""
    ready = not any(site.has_problems or site.asked != sites[0].asked for site in sites)
    groups = sorted(tuple(group) for site in sites for group in site.first_of)
    domains = {group: _domains_of(group, sites) for group in groups}
    name, why, against = _choose(sites, list(domains.values()))
    if ready:  # else some ranks may have built no layers
        against += _check_groups(groups, sites)
    parts: dict[str, Any] = {}
    made = [site.process_groups for site in sites]
    for group in groups if ready and not against else []:
        number = {rank: i for i, domain in enumerate(domains[group]) for rank in domain}
        nodes: dict[str, int] = {}
        parts[_name_of(group)] = {
            "nodes": [nodes.setdefault(sites[rank].node, len(nodes)) for rank in group],
            "domains": [number[rank] for rank in group],
            "made": max(made[rank] for rank in group),
        }
        more = 1 + (name == NVLink.name and len(domains[group]) > 1)
        for rank in group:
            made[rank] = parts[_name_of(group)]["made"] + more
    job = {"name": name, "why": why, "against": shorten(against), "go on": ready and not against}
    job["across"] = any(len(of_group) > 1 for of_group in domains.values())
    job["one queue"] = any(site.one_queue for site in sites)
    return Verdict(job, parts)


def _choose(
    sites: Sequence[_Site], domains_of_groups: Sequence[Sequence[Group]]
) -> tuple[str, str, list[str]]:
    """The name of the transport that was asked for, or that "auto" means, why, and what speaks against it."""
    asked = sites[0].asked
    if asked == P2P.name or any(site.asked != asked for site in sites):
        return P2P.name, "", []
    domains = [domain for of_group in domains_of_groups for domain in of_group]
    too_large = [
        f"{len(d)} ranks share a domain, {MAX_RANKS} may" for d in domains if len(d) > MAX_RANKS
    ]
    against = shorten([*(site.unable for site in sites if site.unable), *too_large])
    if asked == NVLink.name:
        return asked, "", [f"transport={asked!r}: {text}" for text in against]
    against = shorten([*against, *(site.slower for site in sites if site.slower)])
    if all(len(domain) == 1 for domain in domains):
        against.append("no two ranks of a group share an NVLink domain")
    elif any(site.one_queue for site in sites) and len(domains) > len(domains_of_groups):
        against.append(
            "with CUDA_DEVICE_MAX_CONNECTIONS=1 computing would wait while stripes go from domain to domain"
        )
    if against:
        return P2P.name, "; ".join(against), []
    return NVLink.name, "peers share NVLink, and a self-test moved every byte", []


def _check_groups(groups: Sequence[Group], sites: Sequence[_Site]) -> list[str]:
    """Groups that not all of their ranks are in, or that their first rank is not."""
    asking = Counter(name for site in sites for name in site.groups)
    known = {_name_of(group): len(group) for group in groups}
    return [
        f"of the FSSDP group {name} (its first rank, and a hash of its ranks) {count} ranks have MoE layers, "
        f"{known.get(name, 'others')} should"
        for name, count in asking.items()
        if count != known.get(name)
    ]


def _name_of(group: Sequence[int]) -> str:
    return f"{group[0]}-{zlib.crc32(repr(tuple(group)).encode()):08x}"


def _domains_of(group: Group, sites: Sequence[_Site]) -> list[Group]:
    """The ranks of ``group`` by NVLink domain, in the order of their first rank."""
    by_domain: dict[str, list[int]] = {}
    for rank in group:
        by_domain.setdefault(sites[rank].domain, []).append(rank)
    return [tuple(domain) for domain in by_domain.values()]


def _make_transports(
    name: str,
    parts: Mapping[Group, Any],
    *,
    timeout: float,
    nccl: NcclSettings | None,
    can_time: bool,
) -> dict[Group, Transport]:
    """Those of every FSSDP group that this rank is in, over process groups of their own.

    Args:
        name: of the transport.
        parts: of the verdict, by group: all ranks make their groups in ascending order, so none waits for another in a
            circle.
        timeout: seconds per wait.
        nccl: settings of the groups of all ranks; ``None`` on CPU ranks.
        can_time: as in `P2P`.
    """
    make, made = functools.partial(new_group, timeout=timeout), dict[Group, Transport]()
    for group, part in parts.items():
        everyone = make(group, part["made"], description="fssdp transfers", nccl=nccl)
        if name != NVLink.name:
            made[group] = P2P(everyone, timeout=timeout, can_time=can_time)
            continue
        of_rank = part["domains"]
        domains = [
            [i for i, other in enumerate(of_rank) if other == n] for n in range(max(of_rank) + 1)
        ]
        own = everyone
        if len(domains) > 1:
            ranks = [group[i] for i in domains[of_rank[everyone.rank()]]]
            own_nccl = None if nccl is None else dataclasses.replace(nccl, pairs=False)
            own = make(ranks, part["made"] + 1, description="fssdp domain", nccl=own_nccl)
        made[group] = NVLink(everyone, own, domains=domains, timeout=timeout)
    return made
