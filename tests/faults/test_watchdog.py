"""Who is everyone waiting for: real ranks, one of which stands still while Megatron's own all-to-all waits for it.

Oracle: which rank was stopped, and where; literal lines; and an undisturbed run of the same training.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import tiny_gpt
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.faults import watchdog

TIMEOUT = 2.0


def _start_over_tcp() -> Callable[[int], str]:
    """The job gets a TCPStore, whose server is rank 0; returns what reads the output of a rank from now on."""
    folder = Path(os.environ["TEST_FOLDER"])
    rank, size = dist.get_rank(), dist.get_world_size()
    port = [0]
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        f"tcp://127.0.0.1:{port[0]}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    out = (folder / f"out{rank}").open("a", buffering=1)
    sys.stdout = out
    os.dup2(out.fileno(), 2)  # torch's warnings, too
    dist.barrier()
    return lambda of: (folder / f"out{of}").read_text()


def _watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, watchdog.Watchdog)]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "made no progress" in line]


def _train(case: Any, before_forward: Callable = lambda *_: None) -> Any:
    """Two steps of a model whose ranks have no replicas: only Megatron's own collectives wait."""
    convert = tiny_gpt.fssdp_hook(slots=0, timeout=TIMEOUT)

    def hook(chunks: list) -> list:
        chunks[0].register_forward_pre_hook(before_forward)
        return convert(chunks)

    return tiny_gpt.train(case, steps=2, hook=hook)


def _lines_at(text: str, at: str) -> list[str]:
    return [line for line in _lines(text) if f": iteration {at}. Behind: rank 2 " in line]


def _until_reported(read: Callable[[int], str], at: str) -> None:
    """On rank 2, for which everyone waits: until rank 0 has said so, ``at`` an "iteration, place"."""
    deadline = time.monotonic() + 30
    while not _lines_at(read(0), at) and time.monotonic() < deadline:
        time.sleep(0.1)


def _check_line(text: str, at: str, behind: str) -> re.Match:
    """The one line of rank 0, which waits at "iteration, place", and where rank 2 is."""
    (line,), since = _lines_at(text, at), r"since (?P<since>[\d: -]+)"
    expected = rf"FSSDP: rank 0 made no progress for (?P<seconds>\d+) s: iteration {at}\. "
    expected += rf"Behind: rank 2 on {socket.gethostname()} \({behind}, {since}\)(\. Under way .*)?"
    found = re.fullmatch(expected, line)
    assert found, line
    return found


@ranks(3)
def test_a_stopped_rank_is_named_and_training_goes_on() -> None:
    """Rank 2 hangs before its first forward; it stops as a process (SIGSTOP) between attention and router of layer 2,
    in the third iteration; its data loader hangs in the fifth. In between it is slow, but moves."""
    read = _start_over_tcp()
    case = tiny_gpt.initialized(ep=3, experts=6)
    stock = tiny_gpt.train(case, steps=5)
    rank, folder = dist.get_rank(), Path(os.environ["TEST_FOLDER"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    begin = "1, begin of the iteration"
    ours = _train(case, lambda *_: _until_reported(read, begin) if rank == 2 else None)
    _check_line(read(0), begin, "before its first forward")
    layer = tiny_gpt.moe_layers(ours.chunks)[1]

    def stop(*_: Any) -> None:
        if rank == 2:
            hook.remove()
            time.sleep(TIMEOUT / 2)  # it says where it is every quarter of the timeout
            os.kill(os.getpid(), signal.SIGSTOP)

    hook = layer.router.register_forward_pre_hook(stop)

    def wake() -> None:
        _until_reported(read, "3, layer 2")
        os.kill(int((folder / "pid2").read_text()), signal.SIGCONT)

    if rank == 0:
        threading.Thread(target=wake, daemon=True).start()
    began = time.time()
    ours.step(2)
    hook.remove()
    assert [len(_lines(read(rank))) for rank in range(3)] == [2, 0, 0], "once for the job"
    state = "stopped, exited or unreachable; last heartbeat: iteration 3, layer 2"
    line = _check_line(read(0), "3, layer 2", state)
    assert int(line["seconds"]) + 1 >= TIMEOUT
    assert time.mktime(time.strptime(line["since"], "%Y-%m-%d %H:%M:%S")) - began >= -2
    slow = [part for moe in tiny_gpt.moe_layers(ours.chunks) for part in (moe.router, moe.experts)]
    if rank == 2:  # it moves: each half of a layer takes less than the timeout, the step more
        pauses = [
            part.register_forward_pre_hook(lambda *_: time.sleep(0.35 * TIMEOUT)) for part in slow
        ]
    ours.step(3)
    assert len(_lines(read(0))) == 2, "slow is not standing still"
    if rank == 2:
        for pause in pauses:
            pause.remove()
        _until_reported(read, "5, layer 1")  # the data loader
    ours.step(4)
    _check_line(read(0), "5, layer 1", "iteration 4, after a backward")
    ours.read_params()
    assert tiny_gpt.difference(stock, ours) == tiny_gpt.SAME
    dist.barrier()
    said = len(read(rank))
    time.sleep(1.6 * TIMEOUT)  # all have come as far
    (reporter,) = _watchdogs()
    _start_over_tcp()  # the job's process group goes away, and its store, which rank 0 served
    reporter.join(10)
    assert not reporter.is_alive()
    assert len(read(rank)) == said, read(rank)[said:]
    watchdog.watch([0, 1, 2], timeout=TIMEOUT)
    assert len(_watchdogs()) == 1 and _watchdogs() != [reporter]
    dist.barrier()  # rank 0 serves the store


@ranks(3)
def test_a_rank_that_hangs_in_its_backward_is_named() -> None:
    """It lives, and hangs in turn before its backward begins, in the backward of experts and of the embedding, and in
    the forward of experts: all ranks have then come through the same routers and dispatches."""
    read = _start_over_tcp()
    case = tiny_gpt.initialized(ep=3, experts=6)
    ours = _train(case)
    model, iteration, waits = ours.chunks[0].module, 2, ""

    def hang(*_: Any) -> None:
        hook.remove()
        if dist.get_rank() == 2:
            _until_reported(read, waits)

    experts = tiny_gpt.moe_layers(ours.chunks)[0].experts
    weight = next(p for name, p in experts.named_parameters() if "linear_fc2" in name)

    def before_backward(act: Any) -> Any:
        return model.register_forward_hook(lambda _, __, loss: loss.register_hook(act) and None)

    for register, at, behind in (
        (before_backward, "backward of layer 2", "layer 2"),
        (weight.register_hook, "backward of layer 1", "backward of layer 1"),
        (
            model.embedding.word_embeddings.weight.register_hook,
            "after a backward",
            "backward of layer 1",
        ),
        (experts.register_forward_pre_hook, "layer 1", "layer 1"),
    ):
        iteration += 1
        waits = f"{iteration}, {at}"
        hook = register(hang)
        ours.step(iteration - 1)
        hook.remove()
        _check_line(read(0), waits, f"iteration {iteration}, {behind}")
    assert not _lines(read(1)), "once for the job"
    dist.barrier()  # rank 0 serves the store
