"""Attempts of one job in one process, as an in-process restart makes them: groups are destroyed, a model is built anew.

Import this module inside the ranks only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.rerun_state_machine import destroy_rerun_state_machine

from megatron_hecate import HecateConfig, fssdp
from megatron_hecate.comm.transfer import Transfer

STEPS = 4
_number = itertools.count()
Hook = Callable[[list], list] | None


class DeathError(Exception):
    """What kills an attempt."""


@dataclasses.dataclass
class Left:
    """What this process holds while an attempt trains, besides its model."""

    threads: list[str]
    groups: int
    files: int
    objects: dict[str, int]
    tensors: int  # bytes


def new_attempt(case: tiny_gpt.Case) -> None:
    """Destroy all process groups as Megatron's in-process restart does, and make new ones over a store of their own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    leave_attempt()
    store = Path(os.environ["TEST_FOLDER"]) / f"attempt{next(_number)}"
    backend = "cpu:gloo,cuda:nccl" if tiny_gpt.ON_GPU else "gloo"
    dist.init_process_group(
        backend, f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    tiny_gpt.initialize(case)


def leave_attempt() -> None:
    """Destroy Megatron's state and all process groups as Megatron's in-process restart does."""
    num_microbatches_calculator.unset_num_microbatches_calculator()
    parallel_state.destroy_global_memory_buffer()
    parallel_state.destroy_model_parallel()
    destroy_rerun_state_machine()
    dist.destroy_process_group()


def left() -> Left:
    """Our threads, the job's process groups, open files, and live objects of ours by class."""
    for thread in threading.enumerate():
        if thread.name == "fssdp plans":
            # it ends by itself, or with its attempt
            thread.join(20)
    threads = sorted(t.name for t in threading.enumerate() if t is not threading.main_thread())
    groups = len(dist.distributed_c10d._world.pg_names)
    objects: dict[str, int] = {}
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        kind = type(found)
        if issubclass(kind, torch.Tensor):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        if str(kind.__module__).startswith("megatron_hecate."):
            objects[kind.__name__] = objects.get(kind.__name__, 0) + 1
    files = len(list(Path("/proc/self/fd").iterdir()))
    return Left(threads, groups, files, objects, sum(storages.values()))


def attempt(case: tiny_gpt.Case, hook: Hook, point: Point) -> tuple[list[float], Exception, Left]:
    """Train until the attempt dies at ``point``; returns the losses until then, the error with all that it holds, and
    what this process held before."""
    run, held = None, None
    try:
        run = tiny_gpt.train(case, steps=point.at, hook=hook)
        held = left()
        armed = point.die(run)
        with armed if hasattr(armed, "__exit__") else contextlib.nullcontext():
            run.step(point.at)
    except DeathError as error:
        assert run is not None and held is not None
        return run.losses, error, held
    raise AssertionError("the attempt did not die")


def fail(*_: Any, **__: Any) -> None:
    raise DeathError


def in_forward(run: Any) -> None:
    tiny_gpt.moe_layers(run.chunks)[1].router.register_forward_hook(fail)


def in_backward(run: Any) -> None:
    tiny_gpt.moe_layers(run.chunks)[0].register_full_backward_hook(fail)


def before_step(run: Any) -> Any:
    return mock.patch.object(run.optimizer, "step", fail)


def in_transfer(run: Any, name: str) -> None:
    """Rank 0 dies when it has begun its transfer, the others before they begin theirs."""
    begun: list[Transfer] = []
    for layer in tiny_gpt.moe_layers(run.chunks):
        transport = layer.fssdp.transport
        begin = getattr(transport, name)

        def dies(*args: Any, begin: Callable = begin, **settings: Any) -> None:
            if dist.get_rank() == 0:
                # a GPU does not keep the host until its peers come, a CPU rank does
                thread = threading.Thread(target=lambda: begun.append(begin(*args, **settings)))
                thread.start()
                thread.join(0.5)
            raise DeathError

        setattr(transport, name, dies)


def in_wait(run: Any) -> Any:
    """All wait for a transfer, as where nvidia-resiliency-ext injects an error into the training thread."""
    return mock.patch.object(Transfer, "wait", fail)


def while_homes_move(run: Any) -> Any:
    from megatron_hecate.homes.exchange import Relocation

    return mock.patch.object(Relocation, "write", fail)


def while_saving(run: Any) -> None:
    """Homes have moved, and go back for the checkpoint."""
    from checkpoints import save

    run.step(len(run.losses))
    with while_homes_move(run):
        save(run, Path(os.environ["TEST_FOLDER"]) / "checkpoint")


def before_the_first_forward(run: Any) -> None:
    """DDP has wrapped the model."""
    fail()


def ask_more(run: Any) -> None:
    """One rank has asked more questions than others, and has begun more transfers, when all die."""
    from megatron_hecate.faults.attempt import Attempt

    if dist.get_rank() == 1:
        for what in ("question", "model", "clock"):
            Attempt.current().count(what)
        tiny_gpt.moe_layers(run.chunks)[0].fssdp.transport.next_tag()
    fail()


@dataclasses.dataclass(frozen=True)
class Point:
    """Where an attempt dies: what arms the fault before step ``at``, the settings of FSSDP, and whether stock Megatron
    has this place, too."""

    die: Callable[[Any], Any]
    at: int = 2
    stock: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


MOVES = {"rehome": 2, "slots": 0}
IN_FETCH = functools.partial(in_transfer, name="fetch")
IN_RETURN = functools.partial(in_transfer, name="return_gradients")
POINTS = {
    "before the first forward": Point(before_the_first_forward, at=0, stock=True),
    "forward": Point(in_forward, stock=True),
    "fetch": Point(IN_FETCH),
    "fetch, nvlink": Point(IN_FETCH, settings={"transport": "nvlink"}),
    "wait for a transfer": Point(in_wait),
    "backward": Point(in_backward, stock=True),
    "return": Point(IN_RETURN),
    "return, nvlink": Point(IN_RETURN, settings={"transport": "nvlink"}),
    "before the step": Point(before_step, stock=True),
    "while homes move": Point(while_homes_move, settings=MOVES),
    "while a checkpoint is saved": Point(while_saving, settings=MOVES),
    "one rank has asked more": Point(ask_more),
    "before the step, observed": Point(
        before_step, at=0, settings={"observe": True, "record": "observed"}
    ),
    "forward, recorded": Point(in_forward, settings={"record": "recorded"}),
}


def hook_of(point: Point) -> Hook:
    if "rehome" in point.settings:
        from rehoming_hooks import rehoming_hook

        return rehoming_hook(**point.settings)
    settings = dict(point.settings)
    if "record" in settings:
        settings["record"] = f"{os.environ['TEST_FOLDER']}/{settings['record']}"
    if "observe" in settings:
        return fssdp(HecateConfig(**settings))
    return tiny_gpt.fssdp_hook(**settings)
