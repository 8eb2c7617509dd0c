"""Which iterations of a run are traced (``HecateConfig.trace``), and how far the clocks of ranks are apart."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate import trace
from megatron_hecate.config import OBSERVED, HecateConfig
from megatron_hecate.job.attempt import Attempt
from megatron_hecate.megatron.training_globals import running_iteration

PINGS: int = 8  # to rank 0; the fastest counts


def listeners(config: HecateConfig) -> list[Callable[[], None]]:
    """What is to be called when an iteration begins. All ranks ask at once, since they compare clocks.

    Raises:
        TimeoutError: when a rank does not take part in time.
    """
    if config.traced is None:
        return []
    attempt, rank = Attempt.current(), dist.get_rank()
    store = dist.PrefixStore(
        f"megatron_hecate/clock/{attempt.count('clock')}", _get_default_store()
    )
    host = Path("/proc/sys/kernel/random/boot_id").read_text()
    shift = to_rank_0(store, rank, dist.get_world_size(), timeout=config.timeout, host=host)
    now = datetime.now(UTC).isoformat()
    job = store.compare_set("job", "", now).decode()  # what the first rank here says
    traced = trace.Iterations(
        config.traced, config.record or OBSERVED, rank=rank, shift=shift, job=job
    )
    attempt.at_end(traced.close)  # one recorder runs in a process: the next attempt has its own
    return [lambda: traced.begin(running_iteration())]


def to_rank_0(store: dist.Store, rank: int, size: int, *, timeout: float, host: str) -> float:
    """Seconds to add to this process's ``time.perf_counter()`` to have the unix time of rank 0.

    Processes of one ``host`` share its clock. Others ask rank 0 for the time, one after another, and take it that the
    answer was given in the middle of the fastest round trip.
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
    theirs, shift = json.loads(read("0", 0))
    found = []
    for ping in range(PINGS):
        begin = time.perf_counter()
        store.set(f"{rank}/{ping}", host)
        if theirs != host:
            told, end = float(read(f"{rank}/{ping}/answer", 0)), time.perf_counter()
            found.append((end - begin, told - (begin + end) / 2))
    return min(found, default=(0.0, shift))[1]
