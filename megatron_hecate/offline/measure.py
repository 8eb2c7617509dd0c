"""``torchrun ... -m megatron_hecate --measure FILE``: what links and cores really do, for planning.

Run it as the job will run: same nodes, same ranks per node. Every number is the slowest rank's median.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.device.launch import Kernels
from megatron_hecate.plan import Link, Placement, Speeds, World
from megatron_hecate.routing.quotas import QuotaTables
from megatron_hecate.routing.tables import GroupShape

REPEATS: int = 7
CHUNK: int = 16 << 20  # bytes, about one expert
GEMM: tuple[int, int, int] = (
    512,
    512,
    512,
)  # tokens, hidden, ffn on a CPU; a GPU gets 8 times as much of each


def measure(path: str) -> None:
    """Measure and, on rank 0, write ``path``. Starts ``torch.distributed`` from torchrun's environment.

    Raises:
        ValueError: for a single rank, which has no links, and for nodes with different numbers of ranks.
        SystemExit: before anything is measured, when ``path`` cannot be written.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_world_size() < 2:
        raise ValueError(
            "--measure needs at least 2 ranks: torchrun --nproc-per-node 2 -m megatron_hecate --measure FILE"
        )
    failed: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            Path(path).open("a").close()  # fails now, not when all is measured
        except OSError as error:
            failed = [f"--measure cannot write {path}: {error}"]
    dist.broadcast_object_list(failed)
    if failed[0] is not None:
        raise SystemExit(failed[0] if dist.get_rank() == 0 else 2)
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    world = World.from_names(names)
    intra, inter = _link(world, device, same_node=True), _link(world, device, same_node=False)
    if world.num_nodes > 1 and inter is None:
        per_node = sorted(Counter(world.node).values())
        raise ValueError(f"--measure needs equally many ranks on every node, got {per_node}")
    speeds = Speeds(
        intra=intra or inter,
        inter=inter or intra,
        flops=_flops(device),
        routing=_routing(world, device),
        contention=_contention(world, device),
    )
    if dist.get_rank() == 0:
        kind = (
            torch.cuda.get_device_name()
            if device.type == "cuda"
            else f"CPU, {torch.get_num_threads()} threads a rank"
        )
        origin = f"{len(names)} ranks on {world.num_nodes} nodes, {kind}, {dist.get_backend()}, "
        origin += f"torch {torch.__version__}"
        speeds.save(path, origin=origin)
        print(
            f"{origin}\nbetween ranks of a node {_read(speeds.intra)}, of different nodes {_read(speeds.inter)}; GEMMs "
            f"{speeds.flops / 1e12:.3g} TFLOP/s; routing to replicas {speeds.routing * 1e3:.2g} ms per layer and "
            f"microbatch; a hidden copy takes {speeds.contention:.0%} of its time from compute\n"
            f"wrote {path}; use it with --moe-fssdp-speeds {path}",
            flush=True,
        )
    dist.barrier()


def _read(link: Link) -> str:
    return f"{link.bandwidth / 1e9:.3g} GB/s and {link.latency * 1e6:.3g} us"


def _slowest(seconds: float) -> float:
    """The largest of all ranks."""
    times: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(times, seconds)
    return max(times)


def _time(action: Callable[[], object], device: torch.device) -> float:
    """Median seconds of ``action`` on the slowest rank."""
    times = []
    for repeat in range(REPEATS + 2):
        dist.barrier()
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return _slowest(median(times))


def _link(world: World, device: torch.device, *, same_node: bool) -> Link | None:
    """Every rank sends to the next and receives from the last of its node, or of its place on other nodes, at once.

    ``None`` where there are no two such ranks.
    """
    rank, node = dist.get_rank(), world.node
    place = sum(node[r] == node[rank] for r in range(rank))
    if same_node:
        ring = [r for r in range(len(node)) if node[r] == node[rank]]
    else:
        seen: Counter[int] = Counter()
        ring = []
        for r, of_rank in enumerate(node):
            if seen[of_rank] == place:
                ring.append(r)
            seen[of_rank] += 1
    if _slowest(-len(ring)) > -2:  # some rank has no peer
        return None
    at = ring.index(rank)
    ahead, behind = ring[(at + 1) % len(ring)], ring[at - 1]

    def exchange(size: int) -> Callable[[], None]:
        out = torch.ones(size, dtype=torch.uint8, device=device)
        into = torch.empty_like(out)

        def run() -> None:
            ops = [dist.P2POp(dist.isend, out, ahead), dist.P2POp(dist.irecv, into, behind)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return run

    latency = _time(exchange(8), device)
    seconds = _time(exchange(CHUNK), device)
    return Link(bandwidth=CHUNK / max(seconds - latency, 1e-9), latency=latency)


def _contention(world: World, device: torch.device) -> float:
    """How much longer a GEMM takes beside an exchange with the next rank, over the time of the exchange alone."""
    scale = 16 if device.type == "cuda" else 2
    x = torch.randn(scale * GEMM[0], scale * GEMM[1], device=device)
    ahead, behind = (dist.get_rank() + 1) % world.num_ranks, (dist.get_rank() - 1) % world.num_ranks
    out = torch.ones(CHUNK, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)

    def post() -> list[dist.Work]:
        return dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, ahead), dist.P2POp(dist.irecv, into, behind)]
        )

    def exchange() -> None:
        for work in post():
            work.wait()

    def both() -> None:
        works = post()
        x @ x
        for work in works:
            work.wait()

    alone, compute = _time(exchange, device), _time(lambda: x @ x, device)
    extra = _time(both, device) - max(alone, compute)
    return min(1.0, max(0.0, extra / alone))


def _flops(device: torch.device) -> float:
    scale = 8 if device.type == "cuda" else 1
    tokens, hidden, ffn = (scale * size for size in GEMM)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, w = (
        torch.randn(tokens, hidden, device=device, dtype=dtype),
        torch.randn(hidden, ffn, device=device, dtype=dtype),
    )
    return 2.0 * tokens * hidden * ffn / _time(lambda: x @ w, device)


def _routing(world: World, device: torch.device) -> float:
    """Loads exchanged and quotas computed for one layer with two experts per rank, one of them with a replica."""
    num_ranks, rank = world.num_ranks, dist.get_rank()
    homes = Placement.initial(2 * num_ranks, num_ranks, num_slots=1)
    placement = homes.with_replicas((2 * r, (r + 1) % num_ranks) for r in range(num_ranks))
    own = torch.randint(0, 1000, (2 * num_ranks,), dtype=torch.int32, device=device)
    loads: Tensor = own.new_empty(num_ranks * len(own))
    tables = QuotaTables(GroupShape.of(world, placement), device, Kernels(device))
    tables.place(placement)

    def route() -> None:
        dist.all_gather_into_tensor(loads, own)
        tables.parts(loads.view(num_ranks, -1), rank)

    return _time(route, device)
