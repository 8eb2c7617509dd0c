"""Choose the transport of the job, and set it up and test it in the FSSDP group of each rank.

Rank 0 decides for all ranks. The transport `nvlink`, which runs our kernels, must pass a self-test
before training relies on it.
"""

from __future__ import annotations

import dataclasses
import itertools
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_hecate.comm.agreement import collect, shorten
from megatron_hecate.comm.device import device_of_rank, on_gpus
from megatron_hecate.comm.groups import new_group
from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transfer import has_one_queue
from megatron_hecate.comm.transport import Transport
from megatron_hecate.config import AUTO
from megatron_hecate.faults.rendezvous import Question
from megatron_hecate.nvlink.launch import TransferKernels
from megatron_hecate.nvlink.memory import MAX_RANKS
from megatron_hecate.nvlink.peer_memory import symmetric_problem
from megatron_hecate.nvlink.peers import nvlink_domain
from megatron_hecate.nvlink.selftest import self_test
from megatron_hecate.nvlink.transport import NVLink

LABEL = "fssdp transfers"
ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the work of all streams in one queue, where less of a "
    "transfer overlaps with compute (docs/gpu.md). Unset it, or set 32, where Megatron allows "
    "that: on Blackwell, or without tensor and context parallelism"
)

Group = tuple[int, ...]  # ranks of the job, ascending
Domains = list[list[int]]  # NVLink domains of a group, as numbers of its ranks


@dataclasses.dataclass(frozen=True, eq=False)
class Connection:
    """The transport of this rank, and the measurements of its setup.

    Args:
        name: name of the transport in use.
        why: short reason for the choice of "auto"; else empty.
        nodes: node number of each rank of the FSSDP group.
        transport: ``None`` if there are problems, and on a stage without MoE layers.
        nccl_bytes: bytes of this rank's GPU that NCCL took to connect the ranks.
    """

    name: str
    why: str
    nodes: tuple[int, ...] = ()
    transport: Transport | None = None
    nccl_bytes: int = 0


def connect(
    request: str,
    group: Group,
    problems: list[str],
    *,
    timeout: float,
    nccl_ctas: int = 0,
) -> Connection:
    """Choose a transport, the same on all ranks of the job, and set it up. Collective.

    Args:
        request: requested transport, "auto", "p2p" or "nvlink".
        group: ranks of this rank's FSSDP group; empty on a stage without MoE layers.
        problems: problems known to this rank; appended to if ``request`` is not usable. A problem
            on any rank leaves all ranks without a transport.
        timeout: seconds per wait.
        nccl_ctas: see `new_group`.

    Raises:
        TimeoutError: ranks did not arrive in time; names the ranks.
    """
    site = _Site.of_this_rank(request, group, problems)
    question = Question.next(timeout=timeout)
    job = question.ask(dataclasses.asdict(site), _choose_transport)
    name, why = job["name"], job["why"]
    problems += job["against"]
    if not job["go on"]:
        return Connection(name, why)
    nodes, domains = _lay_out([_Site(**note) for note in question.read(group)])
    free = _free_bytes()
    transport: Transport | None = None
    if group:
        everyone = new_group(
            group,
            description=LABEL,
            timeout=timeout,
            nccl_ctas=nccl_ctas,
            nccl_pairs=name == P2P.name or job["across"],
        )
        if name == P2P.name:
            transport = P2P(everyone, timeout=timeout)
        else:
            transport = _make_nvlink(everyone, domains, nccl_ctas=nccl_ctas, timeout=timeout)
    nccl_bytes = max(0, free - _free_bytes())
    failures, is_usable = [], True
    if name == NVLink.name:
        failures, is_usable = self_test(transport, device_of_rank(), timeout=timeout)
    # A rank whose CUDA context was destroyed by the self-test cannot continue with any transport.
    if failures and request == AUTO and is_usable:
        second = connect(P2P.name, group, problems, timeout=timeout, nccl_ctas=nccl_ctas)
        why = f"{name} failed its self-test: {'; '.join(failures)}"
        return dataclasses.replace(second, why=why, nccl_bytes=nccl_bytes + second.nccl_bytes)
    if failures:
        problems += [f"transport={request!r} failed its self-test: {text}" for text in failures]
        transport = None
    if dist.get_rank() == 0 and job["one queue"]:
        print(f"FSSDP: {ONE_QUEUE}", flush=True)
    return Connection(name, why, nodes, transport, nccl_bytes)


def _make_nvlink(
    everyone: dist.ProcessGroup, domains: Domains, *, nccl_ctas: int, timeout: float
) -> NVLink:
    """Create a transport, and a process group of this rank's domain if ``domains`` are several."""
    group_of_domain = everyone
    if len(domains) > 1:
        domain = next(domain for domain in domains if everyone.rank() in domain)
        ranks = [dist.get_global_rank(everyone, rank) for rank in domain]
        # Only kernels run inside a domain, so its pairs need no connections of NCCL.
        group_of_domain = new_group(
            ranks, description="fssdp domain", timeout=timeout, nccl_ctas=nccl_ctas
        )
    return NVLink(everyone, group_of_domain, domains=domains, timeout=timeout)


def _free_bytes() -> int:
    """Synchronize this rank's GPU and return its free bytes; 0 on CPU ranks."""
    if not on_gpus():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@dataclasses.dataclass(frozen=True)
class _Site:
    """Summary of a rank, sent to rank 0 before the transport is chosen (JSON-serializable).

    Args:
        request: requested transport.
        has_problems: True if the rank knows of problems.
        group: ranks of the FSSDP group, on its first rank: one rank describes each group.
        node: host name of the rank's machine.
        domain: name of the rank's NVLink domain; the CPU ranks of one machine share a domain.
        unable: reason why our kernels cannot run on the rank; else empty.
        slower: reason to avoid our kernels unless they are requested; else empty.
        one_queue: result of `transfer.has_one_queue`.
    """

    request: str
    has_problems: bool = False
    group: Sequence[int] = ()
    node: str = ""
    domain: str = ""
    unable: str = ""
    slower: str = ""
    one_queue: bool = False

    @classmethod
    def of_this_rank(cls, request: str, group: Group, problems: list[str]) -> _Site:
        """Describe this rank, and compile the kernels if the transport ``request`` needs them."""
        node = socket.gethostname()
        domain = node
        unable: list[str] = []
        slower = "CPU ranks have no NVLink"
        with collect(unable, node):
            device = device_of_rank()
            if device.type == "cuda" and request != P2P.name:
                domain, slower = nvlink_domain(node)
                if problem := symmetric_problem(device):
                    unable.append(f"{node} {problem}")
            if not unable and (request == NVLink.name or (request == AUTO and not slower)):
                TransferKernels(device)
        return cls(
            request=request,
            has_problems=bool(problems),
            group=group if group[:1] == (dist.get_rank(),) else (),
            node=node,
            domain=domain,
            unable="".join(unable),
            slower=slower,
            one_queue=on_gpus() and has_one_queue(),
        )


def _choose_transport(notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Decide on rank 0, from all `_Site`: the transport, and reasons against it."""
    sites = [_Site(**note) for note in notes]
    is_ready = not any(site.has_problems or site.request != sites[0].request for site in sites)
    groups = sorted(site.group for site in sites if site.group)
    domains = [_lay_out([sites[rank] for rank in group])[1] for group in groups]
    name, why, against = _choose(sites, domains)
    return {
        "name": name,
        "why": why,
        "against": shorten(against),
        "go on": is_ready and not against,
        "across": any(len(of_group) > 1 for of_group in domains),
        "one queue": any(site.one_queue for site in sites),
    }


def _lay_out(sites: Sequence[_Site]) -> tuple[Group, Domains]:
    """Return the node of each rank of a group, and the group's NVLink domains.

    Nodes and domains are in order of their first ranks.

    Args:
        sites: summaries of the ranks of the group.
    """
    nodes: dict[str, int] = {}
    domains: dict[str, list[int]] = {}
    for number, site in enumerate(sites):
        domains.setdefault(site.domain, []).append(number)
        nodes.setdefault(site.node, len(nodes))
    return tuple(nodes[site.node] for site in sites), list(domains.values())


def _choose(
    sites: Sequence[_Site], domains_of_groups: Sequence[Domains]
) -> tuple[str, str, list[str]]:
    """Return the requested transport or the choice of "auto", the reason, and problems with it."""
    request = sites[0].request
    if request == P2P.name or any(site.request != request for site in sites):
        return P2P.name, "", []
    domains = list(itertools.chain.from_iterable(domains_of_groups))
    too_large = [
        f"{len(domain)} ranks share an NVLink domain; at most {MAX_RANKS} are supported"
        for domain in domains
        if len(domain) > MAX_RANKS
    ]
    against = shorten([*(site.unable for site in sites if site.unable), *too_large])
    if request == NVLink.name:
        return request, "", [f"transport={request!r}: {text}" for text in against]
    against = shorten([*against, *(site.slower for site in sites if site.slower)])
    if all(len(domain) == 1 for domain in domains):
        against.append("no two ranks of a group share an NVLink domain")
    # Messages between domains wait for peers on the stream; with one queue, compute waits as well.
    elif any(site.one_queue for site in sites) and len(domains) > len(domains_of_groups):
        against.append(
            "with CUDA_DEVICE_MAX_CONNECTIONS=1 compute would wait while stripes are sent between "
            "domains"
        )
    if against:
        return P2P.name, "; ".join(against), []
    return NVLink.name, "peers share NVLink, and a self-test moved every byte", []
