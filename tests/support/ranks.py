"""``@ranks(4)``: run a test body on every rank of a fresh gloo group, from plain pytest.

The first failing rank fails the test with its traceback; ranks still running at the timeout are named; whatever was
started is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any
from unittest import mock

import rank_modules

# Megatron compiles an extension of torch's. Versions of torch that share a folder lock it in different ways, and wait.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests stand in for a GPU, also where there is one
rank_modules.install()
_context = multiprocessing.get_context("forkserver")
preloaded = "tests.support.preloaded"  # the module that imports what ranks start with
# which fork the ranks, by what they have imported
_servers: dict[str | None, forkserver.ForkServer] = {}


@dataclasses.dataclass(frozen=True)
class _Rank:
    """One of the processes of a test, and the test's body as a new process finds it."""

    module: str
    test: str
    rank: int
    world_size: int
    folder: str


def _run_rank(this: _Rank, args: tuple, kwargs: dict, errors) -> None:
    os.setsid()  # whatever the rank starts (Megatron's checkpoint writer has helpers) can be killed with it
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(this.rank), WORLD_SIZE=str(this.world_size))
    os.environ.update(LOCAL_RANK=str(this.rank), LOCAL_WORLD_SIZE=str(this.world_size))
    os.environ["TEST_FOLDER"] = this.folder  # the same for all ranks, removed after the test
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if (packages := os.environ["PRELOADED"]).startswith("te"):
            import te_on_cpu

            te_on_cpu.install(packages=packages)  # says what the environment lacks
        dist.init_process_group(
            "gloo",
            init_method=f"file://{this.folder}/store",
            rank=this.rank,
            world_size=this.world_size,
            timeout=timedelta(seconds=60),
        )
        getattr(importlib.import_module(this.module), this.test).__wrapped__(*args, **kwargs)
    except BaseException:
        errors.put((this.rank, traceback.format_exc()))
        os._exit(1)  # a failed rank must not hang in teardown
    dist.destroy_process_group()
    os._exit(0)


def _server(packages: str | None) -> forkserver.ForkServer:
    if packages not in _servers:
        server = _servers[packages] = forkserver.ForkServer()
        server.set_forkserver_preload(
            ["torch", "torch.distributed", *([preloaded] if packages else [])]
        )
        with mock.patch.dict(os.environ, PRELOADED=packages or ""):
            server.ensure_running()
    return _servers[packages]


def ranks(
    world_size: int | Callable[..., int],
    *,
    timeout: float = 120,
    killed: frozenset[int] = frozenset(),
    preload: str | Callable[..., str | None] | None = "megatron",
) -> Callable[[Callable], Callable]:
    """Decorate a test so that its body runs on every rank of a fresh process group.

    Args:
        world_size: number of processes, or a function of the test's arguments that says it.
        timeout: seconds for the whole test; then the ranks still running are named and killed.
        killed: ranks that the test kills on purpose.
        preload: what the ranks have imported when they start, which takes them 1 to 3 seconds otherwise: ``megatron``;
            ``te`` or ``te-blackwell``, Megatron over TransformerEngine's newest Python, which `te_on_cpu.install` puts
            there for Hopper or Blackwell; ``None``, neither. Or a function of the test's arguments that says it.
    """

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            count = world_size(*args, **kwargs) if callable(world_size) else world_size
            with tempfile.TemporaryDirectory() as folder:
                errors = _context.SimpleQueue()
                processes = [
                    _context.Process(
                        target=_run_rank,
                        daemon=False,  # Megatron's checkpoint writer starts processes of its own
                        args=(
                            _Rank(body.__module__, body.__name__, rank, count, folder),
                            args,
                            kwargs,
                            errors,
                        ),
                    )
                    for rank in range(count)
                ]
                server = _server(preload(*args, **kwargs) if callable(preload) else preload)
                with mock.patch.object(
                    forkserver, "connect_to_new_process", server.connect_to_new_process
                ):
                    for process in processes:
                        process.start()
                deadline = time.monotonic() + timeout
                try:
                    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
                        if any(
                            p.exitcode not in (None, 0)
                            for r, p in enumerate(processes)
                            if r not in killed
                        ):
                            break
                        time.sleep(0.01)
                    hung = [rank for rank, p in enumerate(processes) if p.is_alive()]
                    codes = [p.exitcode for p in processes]  # negative: died by that signal
                finally:
                    for process in processes:
                        process.kill()
                        process.join()
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(process.pid, signal.SIGKILL)
            if not errors.empty():
                rank, text = errors.get()
                raise AssertionError(f"rank {rank} of {count} failed, exit codes {codes}:\n{text}")
            assert not hung, (
                f"ranks {hung} of {count} still running after {timeout} s, exit codes {codes}"
            )
            failed = [code for rank, code in enumerate(codes) if rank not in killed and code]
            assert not failed, f"exit codes {codes}"

        return test

    return decorate
