"""One rank of a soak (`soak.py`): trains, saves, evaluates, and raises the scheduled exceptions."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from soak_plan import EXCEPTIONS, Event, Plan

SAMPLED = 10  # iterations between two samples of what the process holds
SKEWED = 12  # iterations after which other experts are hot
SLOTS = 2
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


class InjectedError(Exception):
    """A scheduled exception."""


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


class Attempt:
    """One model, from the creation of process groups to their end."""

    def __init__(self, rank: Rank) -> None:
        import tiny_gpt
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._rank = rank
        self._job = rank.job
        self._plan = rank.plan
        dist.init_process_group(
            "gloo",
            store=rank.store(),
            rank=rank.rank,
            world_size=self._job.ranks,
            timeout=timedelta(seconds=self._job.job_timeout),
        )
        self.case = tiny_gpt.Case(
            ep=self._job.ep, experts=8, distributed_optimizer=True, overlap=True, skew=1.5
        )
        # Megatron's groups have a timeout of their own, by default half an hour.
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=self._job.ep,
            distributed_timeout_minutes=self._job.job_timeout / 60,
        )
        tiny_gpt.set_num_microbatches(self.case, 1)
        # Tokens that replicas of this rank have computed.
        self._copied = torch.zeros(1, dtype=torch.int64)
        self._queue = AsyncCallsQueue()
        self.run = tiny_gpt.train(self.case, steps=0, hook=self._hook())
        self._layers = tiny_gpt.moe_layers(self.run.chunks)
        self._skews = [layer.skew.clone() for layer in self._layers]
        self.begin = 0

    def _hook(self) -> Any:
        """FSSDP's hook; attempts alternate between the transports."""
        import tiny_gpt

        if self._job.stock:
            return None
        odd = (self._job.start + self._rank.attempt) % 2
        hook = tiny_gpt.fssdp_hook(
            slots=SLOTS,
            late_replicas=4,
            rehome=15,
            transport="nvlink" if odd else "p2p",
            timeout=self._job.timeout,
            record=f"{self._job.folder}/record",
        )
        return tiny_gpt.counting_hook(hook, self._copied)

    def train(self, handler: Any) -> None:
        """Train from the last checkpoint on."""
        import torch.distributed as dist

        everyones: list[Any] = [None] * self._job.ranks
        # Ranks that an exception meets at different places may know different events.
        dist.all_gather_object(everyones, self._rank.fired)
        self._rank.fired = set.union(*everyones)
        self._load()
        self._rank.log("began", iteration=self.begin)
        for iteration in range(self.begin, self._job.until):
            self._rank.enter(iteration)
            self._rank.log("begins", iteration=iteration)
            self._train_iteration(iteration)
            if iteration in self._plan.evaluations:
                loss = self._evaluate(iteration)
                self._rank.log("evaluated", iteration=iteration, loss=loss)
            ended = any(handler.signals_received())
            self._save_if_due(iteration, ended=ended)
            if ended:
                self._rank.log("terminated", iteration=iteration)
                break
        else:
            self._queue.maybe_finalize_async_calls(blocking=True)
            self._rank.log("done", until=self._job.until)
        dist.destroy_process_group()

    def _train_iteration(self, iteration: int) -> None:
        for layer, skew in zip(self._layers, self._skews, strict=True):
            layer.skew.copy_(skew.roll(3 * (iteration // SKEWED)))
        event = self._event_of(iteration)
        if event is not None and event.kind == "retry":
            with contextlib.suppress(InjectedError), self._armed(event):
                self._pass(iteration, event)
            event = None
        with self._armed(event):
            loss = self._pass(iteration, event)
        done = iteration - self.begin + 1
        held = self._held() if done % SAMPLED == 0 else None
        copied = int(self._copied)
        self._copied.zero_()
        tokens = self.case.micro_batch * self.case.seq * 2 * len(self._layers)
        tokens *= self._plan.microbatches[iteration]
        self._rank.log(
            "stepped", iteration=iteration, loss=loss, copied=copied, tokens=tokens, held=held
        )

    def _event_of(self, iteration: int) -> Event | None:
        """Return the exception of this iteration that has not been raised yet, if any."""
        if not self._job.disturbed:
            return None
        for event in self._plan.events:
            if event.iteration != iteration or event.kind not in EXCEPTIONS:
                continue
            if event.number not in self._rank.fired:
                self._rank.fired.add(event.number)
                self._rank.log("armed", event=event.number)
                return event
        return None

    def _pass(self, iteration: int, event: Event | None) -> float:
        """Train one iteration, which ``event`` may break off before the step; return the loss."""
        import tiny_gpt

        count = self._plan.microbatches[iteration]
        tiny_gpt.set_num_microbatches(self.case, count)
        for chunk in self.run.chunks:
            chunk.zero_grad_buffer()
        self.run.optimizer.zero_grad()
        loss = tiny_gpt.run(self.case, self.run.chunks, iteration, num_microbatches=count)
        if event is not None and event.place == "optimizer step" and self._is_hit(event):
            raise InjectedError(event.kind, event.place)
        updated, _, _ = self.run.optimizer.step()
        assert updated
        return loss

    def _is_hit(self, event: Event) -> bool:
        return event.kind == "retry" or event.rank == self._rank.rank

    @contextlib.contextmanager
    def _armed(self, event: Event | None) -> Iterator[None]:
        """Raise the event's exception within the block, at its place."""
        import tiny_gpt

        if event is None or not self._is_hit(event) or event.place == "optimizer step":
            yield
            return
        left = event.microbatch % self._plan.microbatches[event.iteration]

        def fail(*_: Any, **__: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise InjectedError(event.kind, event.place)

        layer = self._layers[event.layer]
        with contextlib.ExitStack() as stack:
            if event.place == "data iterator":
                forward_step = tiny_gpt.forward_step

                def fetch_and_step(*args: Any, **kwargs: Any) -> Any:
                    fail()
                    return forward_step(*args, **kwargs)

                stack.enter_context(mock.patch.object(tiny_gpt, "forward_step", fetch_and_step))
            elif event.place == "router":
                stack.callback(layer.router.register_forward_hook(fail).remove)
            elif event.place == "experts":
                stack.callback(layer.experts.register_forward_pre_hook(fail).remove)
            else:
                stack.callback(layer.register_full_backward_hook(fail).remove)
            yield

    def _evaluate(self, iteration: int) -> float:
        import tiny_gpt

        with self._parameters_gathered(), tiny_gpt.evaluating(self.run.chunks):
            return tiny_gpt.run(
                self.case,
                self.run.chunks,
                iteration + self._job.iterations,
                num_microbatches=1,
                forward_only=True,
            )

    @contextlib.contextmanager
    def _parameters_gathered(self) -> Iterator[None]:
        """Gather all parameters, and overlap no gather in the block, as Megatron's loop does."""
        for chunk in self.run.chunks:
            chunk.disable_forward_pre_hook()
        yield
        for chunk in self.run.chunks:
            chunk.enable_forward_pre_hook()

    def _save_if_due(self, iteration: int, *, ended: bool) -> None:
        """Save a checkpoint if the plan has one here, or if the job ``ended`` by a signal."""
        self._queue.maybe_finalize_async_calls(blocking=ended)
        how = "sync" if ended else self._plan.saves.get(iteration)
        if how is None or not self._job.disturbed:
            return
        self._queue.maybe_finalize_async_calls(blocking=True)
        with self._parameters_gathered():
            self._save(iteration, how)

    def _save(self, iteration: int, how: str) -> None:
        """Save a checkpoint, or begin to."""
        import checkpoints
        import torch.distributed as dist
        from megatron.core import dist_checkpointing

        begun = time.time()
        name = f"{iteration + 1}-{self._job.start}-{self._rank.attempt}"
        folder = Path(self._job.folder, "checkpoints", name)
        folder.mkdir(exist_ok=True)

        def finish() -> None:
            if self._rank.rank == 0:
                self._publish(folder, iteration + 1)
                seconds = time.time() - begun
                self._rank.log("saved", iteration=iteration, how=how, seconds=seconds)

        if how == "sync":
            checkpoints.save(self.run, folder)
            dist.barrier()
            finish()
            return
        state = checkpoints.state_of(self.run, loading=False)
        request = dist_checkpointing.save(
            state, str(folder), async_sharded_save=True, async_strategy="mcore"
        )
        request.add_finalize_fn(finish)
        self._queue.schedule_async_request(request)

    def _publish(self, folder: Path, iteration: int) -> None:
        """Make ``folder`` the checkpoint that attempts begin with, and remove the others."""
        latest = folder.parent / "latest.json"
        partial = latest.with_suffix(".partial")
        partial.write_text(json.dumps([folder.name, iteration]))
        partial.replace(latest)
        for other in folder.parent.iterdir():
            if other.is_dir() and other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def _load(self) -> None:
        """Load the last complete checkpoint, if there is one."""
        import checkpoints
        import torch.distributed as dist

        latest = Path(self._job.folder, "checkpoints", "latest.json")
        found: list[Any] = [None]
        if self._rank.rank == 0 and latest.exists():
            found = [json.loads(latest.read_text())]
        dist.broadcast_object_list(found)
        if found[0] is not None:
            name, self.begin = found[0]
            checkpoints.load(self.run, latest.parent / name)

    def _held(self) -> dict[str, Any]:
        """Return what the process holds now."""
        import psutil
        import torch.distributed as dist

        threads = sorted(t.name for t in threading.enumerate() if t.name != "MainThread")
        return {
            "resident": psutil.Process().memory_info().rss,
            # plans and transfers in flight have threads of their own
            "threads": [n for n in threads if not n.startswith(("spAG", "spRS", "fssdp plans"))],
            "native": len([*Path("/proc/self/task").iterdir()]),
            "files": len([*Path("/proc/self/fd").iterdir()]),
            "groups": len(dist.distributed_c10d._world.pg_names),
        }

    def abandon(self) -> None:
        """End the attempt as an in-process restart does, wherever it is."""
        import restarts

        for call in self._queue.async_calls:
            call.async_caller.close(abort=True)
        # gloo cannot abort a wait. With its connections shut, waits fail here and on all peers.
        _shut_connections(but=self._job.port)
        restarts.leave_attempt()


def _shut_connections(*, but: int) -> None:
    """Shut down all TCP connections of this process except those to port ``but``."""
    import psutil

    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port != but:
            with contextlib.suppress(OSError):
                duplicate = socket.socket(fileno=os.dup(connection.fd))
                with duplicate:
                    duplicate.shutdown(socket.SHUT_RDWR)
