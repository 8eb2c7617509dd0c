"""Choose the transport between the ranks of the job, set it up and test it.

Rank 0 decides for all ranks. The transport `nvlink`, which runs our kernels, must pass a self-test
before training relies on it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import socket
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_hecate.comm.agreement import shorten
from megatron_hecate.comm.device import device_of_rank, on_gpus
from megatron_hecate.comm.groups import DEFAULT_CTAS, NcclSettings, connect_ranks, new_group
from megatron_hecate.comm.overlap import explain_exposed
from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.problems import collect
from megatron_hecate.comm.transfer import has_one_queue
from megatron_hecate.comm.transport import Transport
from megatron_hecate.config import AUTO
from megatron_hecate.faults.rendezvous import Question, Verdict
from megatron_hecate.nvlink.launch import TransferKernels
from megatron_hecate.nvlink.peer_memory import free_shared_bytes, symmetric_problem
from megatron_hecate.nvlink.peers import nvlink_domain
from megatron_hecate.nvlink.program import MAX_RANKS
from megatron_hecate.nvlink.selftest import self_test
from megatron_hecate.nvlink.transport import NVLink
from megatron_hecate.switch_on.connection import Connection, Group


def connect(
    asked: str,
    groups: Sequence[Group],
    problems: list[str],
    *,
    timeout: float,
    nccl_ctas: int = DEFAULT_CTAS,
) -> Connection:
    """Choose a transport, the same on all ranks of the job, and set it up. Collective.

    Args:
        asked: requested transport, "auto", "p2p" or "nvlink".
        groups: FSSDP groups that this rank is in.
        problems: problems known to this rank; appended to if ``asked`` is not usable. A problem on
            any rank leaves all ranks without transports.
        timeout: seconds per wait.
        nccl_ctas: see `NcclSettings.max_ctas`.

    Raises:
        TimeoutError: ranks did not arrive in time; names the ranks.
    """
    site = _Site.of_this_rank(asked, groups, problems)
    job, parts, sites = _decide(site, groups, timeout=timeout)
    name = job["name"]
    why = job["why"]
    problems += job["against"]
    machines = [(peer.node, peer.shared_memory) for peer in sites]
    if not job["go on"]:
        return Connection(name, why, {}, {}, machines)
    nccl: NcclSettings | None = None
    if on_gpus():
        nccl = NcclSettings(nccl_ctas, pairs=name == P2P.name or job["across"])
    # With one hardware queue `Transfer.wait` enqueues the end of a fetch, which hides its duration.
    can_time = not job["one queue"]
    free = _free_bytes()
    transports = _make_transports(name, parts, timeout=timeout, nccl=nccl, can_time=can_time)
    nccl_bytes = free - _free_bytes()
    failed, usable = _test(name, transports, timeout=timeout)
    # A rank whose CUDA context was destroyed by the self-test cannot continue with any transport.
    if failed and asked == AUTO and usable:
        why = f"{name} failed its self-test: {'; '.join(failed)}"
        name = P2P.name
        transports = {
            group: P2P(old.group, timeout=timeout, can_time=can_time)
            for group, old in transports.items()
        }
        nccl_bytes += _connect_all_pairs(transports, nccl, timeout=timeout)
    elif failed:
        problems += [f"transport={asked!r} failed its self-test: {text}" for text in failed]
        transports = {}
    exposed = ""
    if sites and job["one queue"]:
        exposed = explain_exposed(name, across_domains=job["across"])
    nodes = {group: tuple(part["nodes"]) for group, part in parts.items()}
    return Connection(name, why, nodes, transports, machines, exposed, max(0, nccl_bytes))


def _decide(
    site: _Site, groups: Sequence[Group], *, timeout: float
) -> tuple[Mapping[str, Any], dict[Group, Any], list[_Site]]:
    """Gather every rank's summary on rank 0 and broadcast its decision. Collective.

    Args:
        site: summary of this rank.
        groups: FSSDP groups that this rank is in.
        timeout: seconds per wait.

    Returns:
        Decision for the job; layout of each of ``groups``, ascending, if the setup goes on; on rank
        0 the summaries of all ranks.
    """
    sites: list[_Site] = []

    def judge(notes: list[Any]) -> Verdict:
        sites.extend(_Site(**fields) for fields in notes)
        return _choose_transport(sites)

    names = {group: _name_of(group) for group in sorted(groups)}
    verdict = Question.next(timeout=timeout).ask(
        dataclasses.asdict(site), judge, groups=list(names.values())
    )
    parts: dict[Group, Any] = {}
    if verdict.job["go on"]:
        parts = {group: verdict.groups[of_group] for group, of_group in names.items()}
    return verdict.job, parts, sites


def _test(
    name: str, transports: Mapping[Group, Transport], *, timeout: float
) -> tuple[list[str], bool]:
    """Run the self-test of transport ``name``. Returns as `self_test`."""
    if name != NVLink.name:
        return [], True
    tested = [transport for transport in transports.values() if isinstance(transport, NVLink)]
    return self_test(tested, device_of_rank(), timeout=timeout)


def _connect_all_pairs(
    transports: Mapping[Group, Transport], nccl: NcclSettings | None, *, timeout: float
) -> int:
    """Connect all pairs of ranks, unless they are; return the bytes of the GPU that NCCL took."""
    if nccl is None or nccl.pairs:
        return 0
    free = _free_bytes()
    all_pairs = dataclasses.replace(nccl, pairs=True)
    for transport in transports.values():
        connect_ranks(transport.group, all_pairs, label="fssdp transfers", timeout=timeout)
    return free - _free_bytes()


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
        asked: requested transport.
        has_problems: True if the rank knows of problems.
        groups: names of the FSSDP groups that the rank is in.
        first_of: ranks of each FSSDP group whose first rank this is, so that one rank describes
            each group.
        node: host name of the rank's machine.
        domain: name of the rank's NVLink domain; the CPU ranks of one machine share a domain.
        unable: reason why our kernels cannot run on the rank; else empty.
        slower: reason to avoid our kernels unless they are requested; else empty.
        shared_memory: free bytes of shared memory on the rank's machine.
        one_queue: result of `transfer.has_one_queue`.
    """

    asked: str
    has_problems: bool = False
    groups: Sequence[str] = ()
    first_of: Sequence[Sequence[int]] = ()
    node: str = ""
    domain: str = ""
    unable: str = ""
    slower: str = ""
    shared_memory: int = 0
    one_queue: bool = False

    @classmethod
    def of_this_rank(cls, asked: str, groups: Sequence[Group], problems: list[str]) -> _Site:
        """Describe this rank, and compile the kernels if the transport ``asked`` needs them."""
        node = socket.gethostname()
        domain = node
        unable: list[str] = []
        slower = "CPU ranks have no NVLink"
        with collect(unable, node):
            device = device_of_rank()
            if device.type == "cuda" and asked != P2P.name:
                domain, slower = nvlink_domain(node)
                if problem := symmetric_problem(device):
                    unable.append(f"{node} {problem}")
            if not unable and (asked == NVLink.name or (asked == AUTO and not slower)):
                TransferKernels(device)
        return cls(
            asked=asked,
            has_problems=bool(problems),
            groups=[_name_of(group) for group in groups],
            first_of=[group for group in groups if group[0] == dist.get_rank()],
            node=node,
            domain=domain,
            unable="".join(unable),
            slower=slower,
            shared_memory=free_shared_bytes(),
            one_queue=on_gpus() and has_one_queue(),
        )


def _choose_transport(sites: Sequence[_Site]) -> Verdict:
    """Decide on rank 0: the transport, reasons against it, and the layout of each FSSDP group.

    Ranks of a group need the layout, their nodes and NVLink domains, to create its transport.
    """
    is_ready = not any(site.has_problems or site.asked != sites[0].asked for site in sites)
    groups = sorted(
        tuple(group) for group in itertools.chain.from_iterable(site.first_of for site in sites)
    )
    domains = {group: _domains_of(group, sites) for group in groups}
    name, why, against = _choose(sites, list(domains.values()))
    # A rank with problems, or with other settings, may have built no layers.
    if is_ready:
        against += _check_groups(groups, sites)
    go_on = is_ready and not against
    job = {
        "name": name,
        "why": why,
        "against": shorten(against),
        "go on": go_on,
        "across": any(len(of_group) > 1 for of_group in domains.values()),
        "one queue": any(site.one_queue for site in sites),
    }
    return Verdict(job, _lay_out_groups(domains, sites) if go_on else {})


def _lay_out_groups(
    domains_of: Mapping[Group, Sequence[Group]], sites: Sequence[_Site]
) -> dict[str, Any]:
    """Return node and domain numbers of the ranks of each FSSDP group, by the group's name."""
    parts: dict[str, Any] = {}
    for group, domains in domains_of.items():
        number_of_domain: dict[int, int] = {}
        for number, domain in enumerate(domains):
            number_of_domain.update(dict.fromkeys(domain, number))
        nodes: dict[str, int] = {}
        parts[_name_of(group)] = {
            "nodes": [nodes.setdefault(sites[rank].node, len(nodes)) for rank in group],
            "domains": [number_of_domain[rank] for rank in group],
        }
    return parts


def _choose(
    sites: Sequence[_Site], domains_of_groups: Sequence[Sequence[Group]]
) -> tuple[str, str, list[str]]:
    """Return the requested transport or the choice of "auto", the reason, and problems with it."""
    asked = sites[0].asked
    if asked == P2P.name or any(site.asked != asked for site in sites):
        return P2P.name, "", []
    domains = list(itertools.chain.from_iterable(domains_of_groups))
    too_large = [
        f"{len(domain)} ranks share an NVLink domain; at most {MAX_RANKS} are supported"
        for domain in domains
        if len(domain) > MAX_RANKS
    ]
    against = shorten([*(site.unable for site in sites if site.unable), *too_large])
    if asked == NVLink.name:
        return asked, "", [f"transport={asked!r}: {text}" for text in against]
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


def _check_groups(groups: Sequence[Group], sites: Sequence[_Site]) -> list[str]:
    """Return an error for every FSSDP group that some of its ranks are not in."""
    counts = Counter(itertools.chain.from_iterable(site.groups for site in sites))
    sizes = {_name_of(group): len(group) for group in groups}
    # A group whose first rank is not in it was described by no rank, so its size is unknown.
    return [
        f"FSSDP group {name} (its first rank, and a hash of its ranks): {count} ranks have MoE "
        f"layers, expected {sizes.get(name, 'its first rank as well')}"
        for name, count in counts.items()
        if count != sizes.get(name)
    ]


def _name_of(group: Sequence[int]) -> str:
    """Return a short name of ``group``, the same on all ranks: first rank and hash of the ranks."""
    return f"{group[0]}-{zlib.crc32(repr(tuple(group)).encode()):08x}"


def _domains_of(group: Group, sites: Sequence[_Site]) -> list[Group]:
    """Split ``group`` by NVLink domain, in order of the first ranks."""
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
    """Create the transports of every FSSDP group of this rank, over process groups of their own.

    Args:
        name: name of the transport.
        parts: layout of each group, see `_lay_out_groups`, in ascending order of the groups. All
            ranks create their groups in this order, so that no ranks wait for each other in a
            circle.
        timeout: seconds per wait.
        nccl: NCCL's settings of the group of all ranks; ``None`` on CPU ranks.
        can_time: see `P2P`.
    """
    make = functools.partial(new_group, timeout=timeout)
    transports: dict[Group, Transport] = {}
    for group, part in parts.items():
        everyone = make(group, description="fssdp transfers", nccl=nccl)
        if name != NVLink.name:
            transports[group] = P2P(everyone, timeout=timeout, can_time=can_time)
            continue
        domain_of_rank = part["domains"]
        domains: list[list[int]] = [[] for _ in range(max(domain_of_rank) + 1)]
        for number_in_group, domain in enumerate(domain_of_rank):
            domains[domain].append(number_in_group)
        group_of_domain = everyone
        if len(domains) > 1:
            ranks = [group[i] for i in domains[domain_of_rank[everyone.rank()]]]
            # Only kernels run inside a domain, so its pairs need no connections of NCCL.
            own_nccl = nccl
            if nccl is not None:
                own_nccl = dataclasses.replace(nccl, pairs=False)
            group_of_domain = make(ranks, description="fssdp domain", nccl=own_nccl)
        transports[group] = NVLink(everyone, group_of_domain, domains=domains, timeout=timeout)
    return transports
