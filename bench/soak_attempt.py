"""One attempt of a rank in a soak (`soak.py`): a model from its process groups to their end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from soak_plan import EXCEPTIONS, Event

if TYPE_CHECKING:
    from soak_rank import Rank

SAMPLED = 10  # iterations between two samples of what the process holds
SKEWED = 12  # iterations after which other experts are hot
SLOTS = 2


class InjectedError(Exception):
    """A scheduled exception."""


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
