"""``torchrun ... -m megatron_hecate measure FILE``: measure links and compute for the planner.

Run it as the job will run: same nodes, same ranks per node. Every number is the slowest rank's
median.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from megatron_hecate import files
from megatron_hecate.comm.collectives import gather_rows
from megatron_hecate.comm.rank_0 import VARIABLES, environment_number
from megatron_hecate.device.launch import Kernels
from megatron_hecate.plan import Link, Placement, Speeds, World
from megatron_hecate.routing.quotas import QuotaTables
from megatron_hecate.routing.tables import GroupShape

FEW_RANKS = (
    "measuring needs at least 2 ranks: torchrun --nproc-per-node 2 -m megatron_hecate measure FILE"
)
REPEATS: int = 7
TIMEOUT: float = 60.0
WARMUPS: int = 2
# bytes, about one expert
CHUNK: int = 16 << 20
# tokens, hidden and ffn size of the GEMM on a CPU; a GPU multiplies each by 8
GEMM: tuple[int, int, int] = (512, 512, 512)
# physical experts that are added to one, with the same tokens
MORE_EXPERTS: int = 4
# GEMMs of an expert in the forward: gate and up in one, down
LINEARS: int = 2


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="megatron-hecate measure",
        usage="torchrun ... -m megatron_hecate measure FILE",
        description="Measure links and compute for the cost model, on the nodes and with as many "
        "ranks per node as the job will have. Takes seconds.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", metavar="FILE", help="file to write, for --moe-fssdp-speeds and what-if --cluster"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command on this rank; returns its exit status."""
    parser = make_parser()
    path = parser.parse_args(argv).file
    try:
        numbers = {name: environment_number(name) for name in VARIABLES}
    except ValueError as error:
        parser.error(str(error))
    if numbers["WORLD_SIZE"] < 2:
        parser.error(FEW_RANKS)
    try:
        measure(path)
    except ValueError as error:
        # All ranks have the same problem.
        if numbers["RANK"] == 0:
            print(f"not measured: {error}", file=sys.stderr)
        return 2
    return 0


def measure(path: str) -> None:
    """Measure the speeds of this job; rank 0 writes the file ``path``.

    Starts ``torch.distributed`` from torchrun's environment where it is not running.

    Raises:
        ValueError: for a single rank, which has no links, and for nodes with different numbers
            of ranks.
        SystemExit: before anything is measured, when ``path`` cannot be written.
    """
    device = _start()
    _check_writable(path)
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    world = World.from_names(names)
    intra = _link(world, device, same_node=True)
    inter = _link(world, device, same_node=False)
    if world.num_nodes > 1 and inter is None:
        per_node = sorted(Counter(world.node).values())
        raise ValueError(f"measuring needs the same number of ranks on every node, got {per_node}")
    # A job on one node has no link between nodes, and one rank per node has none inside: the
    # planner gets the only link that exists for both.
    memory = _memory(device)
    speeds = Speeds(
        intra=intra or inter,
        inter=inter or intra,
        flops=_flops(device),
        routing=_routing(world, device),
        contention=_contention(world, device),
        memory=memory,
        launch=_launch(device, memory),
    )
    if dist.get_rank() == 0:
        origin = _origin(world, device)
        speeds.save(path, origin=origin)
        print(_summary(speeds, origin, path), flush=True)
    dist.barrier()


def _start() -> torch.device:
    """Select this rank's device and start ``torch.distributed``; returns the device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", environment_number("LOCAL_RANK"))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend)
    if dist.get_world_size() < 2:
        raise ValueError(FEW_RANKS)
    return device


def _check_writable(path: str) -> None:
    """Exit on all ranks if rank 0 cannot write ``path``, before minutes are spent measuring."""
    failed: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            files.check_writable(path)
        except OSError as error:
            failed = [f"cannot write {path}: {error}"]
    dist.broadcast_object_list(failed)
    if failed[0] is None:
        return
    # Only rank 0 prints the message.
    if dist.get_rank() == 0:
        raise SystemExit(failed[0])
    raise SystemExit(2)


def _origin(world: World, device: torch.device) -> str:
    """Describe the machine and the software of this measurement."""
    if device.type == "cuda":
        kind = torch.cuda.get_device_name()
    else:
        kind = f"CPU, {torch.get_num_threads()} threads a rank"
    return (
        f"{world.num_ranks} ranks on {world.num_nodes} nodes, {kind}, {dist.get_backend()}, "
        f"torch {torch.__version__}"
    )


def _summary(speeds: Speeds, origin: str, path: str) -> str:
    """Format the measured speeds, and the flag that uses them."""
    return (
        f"{origin}\n"
        f"between ranks of a node {_link_text(speeds.intra)}, "
        f"of different nodes {_link_text(speeds.inter)}; "
        f"GEMMs {speeds.flops / 1e12:.3g} TFLOP/s; "
        f"routing to replicas {speeds.routing * 1e3:.2g} ms per layer and microbatch; "
        f"a hidden copy takes {speeds.contention:.0%} of its time from compute; "
        f"memory {speeds.memory / 1e9:.3g} GB/s; "
        f"each further expert of a rank {speeds.launch * 1e3:.2g} ms per microbatch\n"
        f"wrote {path}; use it with --moe-fssdp-speeds {path}"
    )


def _link_text(link: Link) -> str:
    return f"{link.bandwidth / 1e9:.3g} GB/s and {link.latency * 1e6:.3g} us"


def _slowest(seconds: float) -> float:
    """Return the maximum over all ranks."""
    times: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(times, seconds)
    return max(times)


def _time(action: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of ``action`` on the slowest rank."""
    times = []
    for repeat in range(REPEATS + WARMUPS):
        dist.barrier()
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat >= WARMUPS:
            times.append(time.perf_counter() - start)
    return _slowest(median(times))


def _ring(node: tuple[int, ...], *, same_node: bool) -> list[int]:
    """List this rank's peers: all ranks of its node, or the rank of its local index on each node.

    Args:
        node: node of every rank, [R].
        same_node: whether peers are those of this rank's node.
    """
    rank = dist.get_rank()
    nodes = [[peer for peer, k in enumerate(node) if k == one] for one in dict.fromkeys(node)]
    neighbours = next(ranks for ranks in nodes if rank in ranks)
    if same_node:
        return neighbours
    local_index = neighbours.index(rank)
    return [ranks[local_index] for ranks in nodes if local_index < len(ranks)]


def _post(ring: Sequence[int], device: torch.device, size: int) -> Callable[[], list[dist.Work]]:
    """Prepare a message of ``size`` bytes from every rank of ``ring`` to the next.

    Returns:
        Function that posts this rank's send and receive.
    """
    index = ring.index(dist.get_rank())
    out = torch.ones(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(out)
    next_rank, last_rank = ring[(index + 1) % len(ring)], ring[index - 1]
    return lambda: dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, next_rank), dist.P2POp(dist.irecv, received, last_rank)]
    )


def _wait(works: Sequence[dist.Work]) -> None:
    """Wait for all posted messages."""
    for work in works:
        work.wait()


def _link(world: World, device: torch.device, *, same_node: bool) -> Link | None:
    """Measure a ring in which all ranks send to the next and receive from the previous at once.

    Args:
        world: nodes of the ranks.
        device: device of the buffers.
        same_node: one ring per node; otherwise one ring per local index, across nodes.

    Returns:
        ``None`` where a ring has a single rank.
    """
    ring = _ring(world.node, same_node=same_node)
    # All ranks leave together if any ring has one rank: the minimum length, as -max(-length).
    if _slowest(-len(ring)) > -2:
        return None
    few, many = (_post(ring, device, size) for size in (8, CHUNK))
    latency = _time(lambda: _wait(few()), device)
    seconds = _time(lambda: _wait(many()), device)
    return Link(bandwidth=CHUNK / max(seconds - latency, 1e-9), latency=latency)


def _contention(world: World, device: torch.device) -> float:
    """Measure the slowdown of a GEMM that overlaps an exchange, as a share of the exchange's time.

    The exchange is with the neighbouring ranks; the result is clipped to 0 .. 1.
    """
    # Long enough to overlap the whole exchange on either device.
    scale = 16 if device.type == "cuda" else 2
    x = torch.randn(scale * GEMM[0], scale * GEMM[1], device=device)
    post = _post(range(world.num_ranks), device, CHUNK)

    def overlapped() -> None:
        works = post()
        x @ x
        _wait(works)

    exchange_seconds = _time(lambda: _wait(post()), device)
    gemm_seconds = _time(lambda: x @ x, device)
    extra = _time(overlapped, device) - max(exchange_seconds, gemm_seconds)
    return min(1.0, max(0.0, extra / exchange_seconds))


def _gemm(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the operands of a GEMM, tokens and weight, in bf16 on a GPU and in fp32 on a CPU."""
    scale, dtype = (8, torch.bfloat16) if device.type == "cuda" else (1, torch.float32)
    tokens, hidden, ffn = (scale * size for size in GEMM)
    x = torch.randn(tokens, hidden, device=device, dtype=dtype)
    return x, torch.randn(hidden, ffn, device=device, dtype=dtype)


def _flops(device: torch.device) -> float:
    """Measure the FLOP/s of a GEMM."""
    x, w = _gemm(device)
    return 2.0 * len(x) * w.numel() / _time(lambda: x @ w, device)


def _memory(device: torch.device) -> float:
    """Measure the bytes/s of an addition in place, which reads and writes every number."""
    # beyond the caches of either device
    numbers = torch.zeros(16 * CHUNK // 4, device=device)
    return 2.0 * numbers.nbytes / _time(lambda: numbers.add_(1.0), device)


def _launch(device: torch.device, memory: float) -> float:
    """Measure the seconds of one more expert for the same tokens, without its memory traffic.

    Each expert runs its forward and the gradients of its tokens and of its weight, which are added
    to an fp32 sum.
    """
    x, w = _gemm(device)
    weights = [w.clone() for _ in range(1 + MORE_EXPERTS)]
    sums = [torch.zeros_like(w, dtype=torch.float32) for _ in weights]

    def compute(number: int) -> None:
        for part, weight, total in zip(x.chunk(number), weights, sums, strict=False):
            y = part @ weight
            y @ weight.T
            total += part.T @ y

    one, many = (_time(lambda n=n: compute(n), device) for n in (1, 1 + MORE_EXPERTS))
    traffic = (2 * w.nbytes + 2 * sums[0].nbytes) / memory
    return LINEARS * max(0.0, (many - one) / MORE_EXPERTS - traffic)


def _routing(world: World, device: torch.device) -> float:
    """Measure the gather of loads plus the quota computation of one layer, in seconds.

    The layer has two experts per rank, one of which has a replica.
    """
    num_ranks = world.num_ranks
    rank = dist.get_rank()
    homes = Placement.initial(2 * num_ranks, num_ranks, num_slots=1)
    placement = homes.with_replicas((2 * r, (r + 1) % num_ranks) for r in range(num_ranks))
    tokens = torch.randint(0, 1000, (2 * num_ranks,), dtype=torch.int32, device=device)
    tables = QuotaTables(GroupShape(world, placement), device, Kernels(device))
    tables.place(placement)

    def route() -> None:
        loads = gather_rows(
            tokens, dist.group.WORLD, what="gathering loads", label="measure", timeout=TIMEOUT
        )
        tables.parts_and_exchange(loads, rank)

    return _time(route, device)
