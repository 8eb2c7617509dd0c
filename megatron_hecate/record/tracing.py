"""Setup of traces (``HecateConfig.trace``): traced iterations, and offsets of the ranks' clocks."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate import trace
from megatron_hecate.config import HecateConfig
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.megatron.training_globals import running_iteration
from megatron_hecate.record import telemetry

# Round trips to rank 0 per rank; the fastest is used.
PINGS: int = 8


def listeners(config: HecateConfig, folder: str | None) -> list[Callable[[], None]]:
    """Create the listeners to call at the beginning of an iteration.

    Collective if iterations are traced into files: compares clocks.

    Args:
        config: the settings, with the traced iterations.
        folder: folder of the traces; ``None`` only without traced iterations.

    Raises:
        TimeoutError: when a rank does not take part in time.
    """
    exported = telemetry.iteration_listeners(running_iteration)
    if config.traced is None:
        return exported
    attempt = Attempt.current()
    rank = dist.get_rank()
    store = dist.PrefixStore(
        f"megatron_hecate/clock/{attempt.count('clock')}", _get_default_store()
    )
    host = Path("/proc/sys/kernel/random/boot_id").read_text()
    shift = to_rank_0(store, rank, dist.get_world_size(), timeout=config.timeout, host=host)
    assert folder is not None
    traced = trace.Iterations(config.traced, folder, rank=rank, shift=shift, job=attempt.started)
    # Only one recorder can run in a process, and the next attempt has its own.
    attempt.at_end(traced.close)
    return [*exported, lambda: traced.begin(running_iteration())]


def to_rank_0(store: dist.Store, rank: int, size: int, *, timeout: float, host: str) -> float:
    """Measure the offset of this process's clock from rank 0's.

    Processes of one host share its clock. Other ranks query rank 0's time, one rank after another,
    and assume that rank 0 answered in the middle of the fastest round trip.

    Args:
        store: store of the ranks that compare clocks.
        rank: this rank.
        size: number of ranks.
        timeout: seconds to wait for another rank.
        host: identity of the host.

    Returns:
        Seconds to add to this process's ``time.perf_counter()`` for the unix time of rank 0.

    Raises:
        TimeoutError: when a rank does not take part in time.
    """

    def read(name: str, other: int) -> str:
        try:
            store.wait([name], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise TimeoutError(
                f"FSSDP: rank {rank} waited {timeout:g} s for rank {other} to compare clocks"
            ) from error
        return store.get(name).decode()

    if rank == 0:
        shift = time.time() - time.perf_counter()
        store.set("0", json.dumps([host, shift]))
        for other, ping in itertools.product(range(1, size), range(PINGS)):
            if read(f"{other}/{ping}", other) != host:
                store.set(f"{other}/{ping}/answer", repr(time.perf_counter() + shift))
        return shift
    host_of_rank_0, shift = json.loads(read("0", 0))
    found: list[tuple[float, float]] = []
    for ping in range(PINGS):
        begin = time.perf_counter()
        # Also on rank 0's host: rank 0 waits for every ping, and learns the host from it.
        store.set(f"{rank}/{ping}", host)
        if host_of_rank_0 != host:
            time_of_rank_0 = float(read(f"{rank}/{ping}/answer", 0))
            end = time.perf_counter()
            found.append((end - begin, time_of_rank_0 - (begin + end) / 2))
    _, shift = min(found, default=(0.0, shift))
    return shift
