"""One rank of a soak (`soak.py`): its process, and attempt after attempt in it."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import types
from datetime import timedelta
from typing import Any

from soak_attempt import Attempt, InjectedError
from soak_plan import Plan

PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of one start of the job's processes, the same for all ranks.

    Args:
        folder: folder of the run.
        ranks: number of processes.
        ep: size of the expert-parallel groups.
        iterations: iterations of the whole run.
        until: number of iterations after which this job ends.
        seed: seed of the plan.
        stock: whether stock Megatron trains, without FSSDP.
        disturbed: whether events happen and checkpoints are saved.
        start: number of this start.
        fired: numbers of the events that have happened in earlier starts.
        port: port of the rendezvous store, which the supervisor hosts as torchrun does.
        timeout: ``HecateConfig.timeout``, seconds.
        job_timeout: timeout of the process groups, seconds.
    """

    folder: str
    ranks: int
    ep: int
    iterations: int
    until: int
    seed: int
    stock: bool
    disturbed: bool
    start: int
    fired: frozenset[int]
    port: int
    timeout: float
    job_timeout: float


def main(job: Job, rank: int) -> None:
    """Run one rank in a forked process; exit status 1 after an exception."""
    # Helpers of checkpoints share the rank's session, so that the supervisor finds them.
    os.setsid()
    # A rank must not outlive a supervisor that is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(log_of(job, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_RANK=str(rank))
    os.environ["TMPDIR"] = f"{job.folder}/tmp"
    code = 1
    try:
        Rank(job, rank).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    # multiprocessing ends a process without the functions that a script's interpreter calls.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def log_of(job: Job, rank: int) -> str:
    return f"{job.folder}/logs/start-{job.start}-rank-{rank}.log"


class Rank:
    """Training of one rank, over all attempts in this process."""

    def __init__(self, job: Job, rank: int) -> None:
        import torch.distributed as dist

        self.job = job
        self.rank = rank
        self.plan = Plan.make(seed=job.seed, iterations=job.iterations, ranks=job.ranks)
        self.fired = set(job.fired)
        self.attempt = 0
        self._store = dist.TCPStore(
            "127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=60)
        )
        self._progress = os.open(
            f"{job.folder}/progress/rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        # Megatron's loop keeps the number of the running iteration in its arguments.
        self._args = types.SimpleNamespace(curr_iteration=0)

    def log(self, what: str, **values: Any) -> None:
        """Append one line to this rank's progress, in one write, which a SIGKILL cannot split."""
        line = {"what": what, "start": self.job.start, "attempt": self.attempt, "time": time.time()}
        os.write(self._progress, (json.dumps({**line, **values}) + "\n").encode())

    def run(self) -> None:
        """Train attempt after attempt, until the last iteration, SIGTERM, or a fatal exception."""
        import torch
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.training import dist_signal_handler, global_vars

        torch.set_num_threads(1)
        # By default Megatron spawns this helper, which imports torch for seconds after each start.
        filesystem_async.get_write_results_queue("fork")
        # Megatron logs each change of the number of microbatches.
        logging.getLogger("megatron").setLevel(logging.WARNING)
        global_vars._GLOBAL_ARGS = self._args
        with dist_signal_handler.DistributedSignalHandler(signal.SIGTERM) as handler:
            while True:
                attempt = Attempt(self)
                try:
                    attempt.train(handler)
                    return
                except Exception as error:
                    traceback.print_exc()
                    if not self._restarts(error):
                        self.log("failed", error=f"{type(error).__name__}: {error}"[:2000])
                        raise
                    self.log("restarts", error=f"{type(error).__name__}: {error}"[:2000])
                attempt.abandon()
                del attempt
                self.attempt += 1

    def _restarts(self, error: Exception) -> bool:
        """Whether all ranks restart in their processes: the rank with the event has said so."""
        key = f"restart/{self.job.start}/{self.attempt}"
        if isinstance(error, InjectedError) and error.args[0] == "restart":
            self._store.set(key, "1")
        return self._store.check([key])

    def store(self) -> Any:
        """Return the store of the running attempt."""
        import torch.distributed as dist

        return dist.PrefixStore(f"{self.job.start}/{self.attempt}", self._store)

    def enter(self, iteration: int) -> None:
        self._args.curr_iteration = iteration
