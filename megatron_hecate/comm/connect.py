"""Which transport moves experts between which ranks; one by our kernels is tested before training relies on it."""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hecate.comm.agreement import Note
from megatron_hecate.comm.nvlink.launch import TransferKernels
from megatron_hecate.comm.nvlink.peers import COUNTERS, SHARED, Peers
from megatron_hecate.comm.nvlink.schedule import MAX_RANKS
from megatron_hecate.comm.nvlink.selftest import self_test
from megatron_hecate.comm.nvlink.transport import NVLink
from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transfer import has_one_queue
from megatron_hecate.comm.transport import Transport
from megatron_hecate.config import AUTO

Group = tuple[int, ...]  # ranks of the job, ascending


@dataclasses.dataclass(frozen=True, eq=False)
class Connection:
    """How the ranks of the job move experts.

    Args:
        name: of the transport in use.
        why: in a few words, where "auto" chose.
        exposed: what computing waits for, and the way out, where that can be known now.
        nodes: machine of every rank of the job.
        transports: by the ranks of each FSSDP group that this rank is in; empty when there are problems.
        shared_memory: bytes that are free on the machine of every rank.
    """

    name: str
    why: str
    nodes: tuple[str, ...]
    transports: Mapping[Group, Transport]
    shared_memory: tuple[int, ...]
    exposed: str = ""

    def shared_memory_problems(self, replica_bytes: Mapping[int, int]) -> list[str]:
        """Why the memory of CPU ranks does not suffice for the transport.

        Args:
            replica_bytes: of the ranks that have replicas: their buffers, and what the transport needs beside.
        """
        if self.name != NVLink.name or _on_gpus():
            return []
        problems = []
        for node in sorted({self.nodes[rank] for rank in replica_bytes}):
            here = [rank for rank in replica_bytes if self.nodes[rank] == node]
            needed = sum(replica_bytes[rank] + COUNTERS for rank in here)
            free = min(self.shared_memory[rank] for rank in here)
            if needed > free:
                problems.append(
                    f"transport={self.name!r} needs {needed} bytes of shared memory on {node}, {free} are free in "
                    f"{SHARED}; make it larger, or use p2p, fewer slots or a shorter lifetime"
                )
        return problems


def connect(asked: str, groups: Sequence[Group], problems: list[str], *, timeout: float) -> Connection:
    """Choose a transport, the same on all ranks of the job, and set it up. All ranks call at once.

    Args:
        asked: "auto", "p2p" or "nvlink".
        groups: the FSSDP groups that this rank is in.
        problems: that it knows of; gets what speaks against what was ``asked``. Any on any rank: no transports.
        timeout: seconds per wait.

    Raises:
        TimeoutError: naming the ranks that did not come in time.
    """
    ranks = _Site.of_this_rank(asked, groups, problems).exchange(timeout=timeout)
    name, why, against = _choose(asked, ranks)
    problems += against
    nodes, shared = tuple(rank.node for rank in ranks), tuple(rank.shared_memory for rank in ranks)
    if against or any(rank.problems or rank.settings != ranks[0].settings for rank in ranks):
        return Connection(name, why, nodes, {}, shared)
    transports = _make_transports(name, ranks, timeout=timeout)
    failed: list[str] = []
    usable = True
    if name == NVLink.name:
        tested = [transport for transport in transports.values() if isinstance(transport, NVLink)]
        failed, usable = self_test(tested, device_of_rank(), timeout=timeout)
    if failed and asked == AUTO and usable:
        why = f"{name} failed its self-test: {'; '.join(failed)}"
        name = P2P.name
        transports = {group: P2P(old.group, timeout=timeout) for group, old in transports.items()}
    elif failed:
        problems += [f"transport={asked!r} failed its self-test: {text}" for text in failed]
        transports = {}
    return Connection(name, why, nodes, transports, shared, _explain_exposed(name, ranks))


def _on_gpus() -> bool:
    """Whether this job trains on GPUs."""
    return "nccl" in str(dist.get_backend_config())


def device_of_rank() -> torch.device:
    """Where this rank trains."""
    return torch.device("cuda", torch.cuda.current_device()) if _on_gpus() else torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class _Site(Note):
    """What a rank tells the others before they choose a transport: as settings, which one it was asked for.

    Args:
        groups: ranks of the FSSDP groups it is in.
        node: name of the machine it runs on.
        domain: name of its NVLink domain; CPU ranks of one machine are one.
        unable: why our kernels cannot run on this rank.
        slower: why they should not, unless asked for.
        shared_memory: bytes that are free on its machine.
        one_queue: as in `transfer.has_one_queue`.
    """

    groups: Sequence[Sequence[int]] = ()
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
            settings={"transport": asked},
            problems=list(problems),
            groups=groups,
            node=node,
            domain=domain,
            unable=unable,
            slower=slower,
            shared_memory=Peers.free_bytes(),
            one_queue=_on_gpus() and has_one_queue(),
        )


def _choose(asked: str, ranks: Sequence[_Site]) -> tuple[str, str, list[str]]:
    """The name of the transport that ``asked`` means, why, and what speaks against it: the same on all ranks."""
    if asked == P2P.name or any(rank.settings != ranks[0].settings for rank in ranks):
        return P2P.name, "", []
    domains = [domain for group in _groups_of_job(ranks) for domain in _domains_of(group, ranks)]
    too_large = [f"{len(d)} ranks share a domain, {MAX_RANKS} may" for d in domains if len(d) > MAX_RANKS]
    against = [*dict.fromkeys(rank.unable for rank in ranks if rank.unable), *too_large]
    if asked == NVLink.name:
        return asked, "", [f"transport={asked!r}: {text}" for text in against]
    against += dict.fromkeys(rank.slower for rank in ranks if rank.slower)
    if all(len(domain) == 1 for domain in domains):
        against.append("no two ranks of a group share an NVLink domain")
    elif any(rank.one_queue for rank in ranks) and _crosses_domains(ranks):
        against.append("with CUDA_DEVICE_MAX_CONNECTIONS=1 computing would wait while stripes go from domain to domain")
    if against:
        return P2P.name, "; ".join(against), []
    return NVLink.name, "peers share NVLink, and a self-test moved every byte", []


def _crosses_domains(ranks: Sequence[_Site]) -> bool:
    return any(len(_domains_of(group, ranks)) > 1 for group in _groups_of_job(ranks))


def _explain_exposed(name: str, ranks: Sequence[_Site]) -> str:
    """What of transport ``name`` computing waits for, and the way out: work of all streams is in one queue on some
    rank. Empty when nothing is known to be."""
    if not any(rank.one_queue for rank in ranks):
        return ""
    if name == P2P.name:
        exposed = "messages run beside computing, sums of gradients do not, nor all but the last of several rounds"
    elif _crosses_domains(ranks):
        exposed = "computing waits while stripes go from domain to domain; --moe-fssdp-transport p2p waits for less"
    else:
        exposed = "each transfer is one kernel, which runs beside computing; copy engines are not used"
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 puts the work of all streams in one queue. With transport {name} {exposed}. "
        "Unset it, or set 32, where Megatron allows that: on Blackwell, or without tensor and context parallelism"
    )


def _groups_of_job(ranks: Sequence[_Site]) -> list[Group]:
    return sorted({tuple(group) for rank in ranks for group in rank.groups})


def _domains_of(group: Group, ranks: Sequence[_Site]) -> list[Group]:
    """The ranks of ``group`` by NVLink domain, in the order of their first rank."""
    by_domain: dict[str, list[int]] = {}
    for rank in group:
        by_domain.setdefault(ranks[rank].domain, []).append(rank)
    return [tuple(domain) for domain in by_domain.values()]


def _make_transports(name: str, ranks: Sequence[_Site], *, timeout: float) -> dict[Group, Transport]:
    """Those of every FSSDP group that this rank is in, over process groups of their own. All ranks make all groups."""
    make = functools.partial(_new_group, timeout=timedelta(seconds=max(timeout, 1.0)))
    made: dict[Group, Transport] = {}
    for group in _groups_of_job(ranks):
        everyone, own = make(list(group), group_desc="fssdp transfers"), None
        domains = _domains_of(group, ranks)
        for domain in domains if name == NVLink.name else []:
            of_domain = everyone if len(domains) == 1 else make(list(domain), group_desc="fssdp domain")
            own = of_domain if dist.get_rank() in domain else own
        if dist.get_rank() in group:
            numbers = [[group.index(rank) for rank in domain] for domain in domains]
            made[group] = (
                P2P(everyone, timeout=timeout)
                if own is None
                else NVLink(everyone, own, domains=numbers, timeout=timeout)
            )
    # NCCL connects ranks when a group is first used, by all of them; copies are by some
    for transport in made.values():
        dist.all_reduce(torch.zeros(1, device=device_of_rank()), group=transport.group)
    return made


def _new_group(ranks: list[int], *, timeout: timedelta, group_desc: str) -> dist.ProcessGroup:
    """A process group for transfers. NCCL's kernels run on a stream of the group's own; a peer waits for them, so they
    come before other work."""
    options = None
    if _on_gpus():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
    return dist.new_group(ranks, timeout=timeout, pg_options=options, group_desc=group_desc)
