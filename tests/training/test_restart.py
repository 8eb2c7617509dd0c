"""A job restarts in its process after an error, as with nvidia-resiliency-ext: new process groups, and a new model.

Oracle: stock Megatron, which trains on; and what this process held while its first attempt trained.
`pytest -s -m slow tests/training/test_restart.py` prints the table of docs/restart.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import gc
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from ranks import ranks

ATTEMPTS = 3


def _deaths(*, held: bool, stock: bool, points: list[str], times: int) -> Iterator[tuple[str, Any]]:
    """Have attempts die at each of ``points``, so often in a row; after each, what the process held before it died.

    Args:
        held: whether the errors are kept, with their tracebacks and all that these hold.
        stock: whether attempts train without FSSDP.
        points: names in `restarts.POINTS`.
        times: attempts for each point.
    """
    import restarts
    import tiny_gpt

    case = tiny_gpt.Case(accumulate=2)
    restarts.new_attempt(case)
    expected = tiny_gpt.train(case, steps=restarts.STEPS).losses
    errors: list[Any] = []
    for name in points:
        point = restarts.POINTS[name]
        for _ in range(times):
            restarts.new_attempt(case)
            losses, error, left = restarts.attempt(
                case, None if stock else restarts.hook_of(point), point
            )
            assert losses == pytest.approx(expected[: len(losses)], rel=1e-5), name
            errors += [error] if held else []
            del error
            yield name, left
    restarts.new_attempt(case)
    again = tiny_gpt.train(
        case, steps=restarts.STEPS, hook=None if stock else tiny_gpt.fssdp_hook()
    )
    assert again.losses == pytest.approx(expected, rel=1e-5) and (stock or again.replicas > 0)
    del again
    yield "trains on", restarts.left()


def _check_flat(name: str, first: Any, now: Any) -> None:
    """The threads and groups of the first attempt, and not more than what the point needs."""
    import restarts

    records = name in restarts.POINTS and "record" in restarts.POINTS[name].settings
    more = [thread for thread in ("fssdp record",) if thread in now.threads and records]
    assert sorted([*first.threads, *more]) == now.threads, (name, now.threads)
    assert now.groups <= first.groups + (name.startswith("while")), (
        name,
        now.groups,
    )  # those in which homes move


@ranks(2, timeout=200)
def test_wherever_an_attempt_dies_the_next_one_trains() -> None:
    """Everything of the attempts before is still referenced."""
    import restarts
    import torch.distributed as dist

    from megatron_hecate.faults import attempt

    found = list(_deaths(held=True, stock=False, points=[*restarts.POINTS], times=1))
    for name, left in found:
        _check_flat(name, found[0][1], left)
    with mock.patch.object(attempt, "LINGER", 0.5):  # and without a next attempt
        dist.destroy_process_group()
        deadline = time.monotonic() + 20
        while (threads := restarts.our_threads()) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert not threads
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # which the rank destroys


@pytest.mark.parametrize("kept", ["cycles not collected", "collected"])
@pytest.mark.slow
@ranks(2, timeout=600)
def test_three_attempts_at_each_point(kept: str) -> None:
    """Threads, groups and memory are flat; what stock Megatron itself leaves behind is left in both."""
    import restarts
    import torch.distributed as dist

    if kept == "cycles not collected":
        gc.disable()
    places = [name for name, point in restarts.POINTS.items() if point.stock]
    of_stock = list(_deaths(held=False, stock=True, points=places, times=ATTEMPTS))
    found = []
    for name, left in _deaths(held=False, stock=False, points=[*restarts.POINTS], times=ATTEMPTS):
        found.append((name, left))
        _check_flat(name, found[0][1], left)
        if kept == "collected":
            gc.collect()
    growth = [
        (of[-2][1].tensors - of[ATTEMPTS][1].tensors) / (len(of) - ATTEMPTS - 2)
        for of in (of_stock, found)
    ]
    if kept == "collected":
        assert growth[1] <= 1.05 * growth[0], growth
    if dist.get_rank() == 1:  # which has all kinds of threads
        print(
            f"\n{kept}: tensors alive grow by {growth[0]:.0f} bytes an attempt in stock, {growth[1]:.0f} in ours"
        )
        print(restarts.table(of_stock, found), flush=True)


class _InjectedError(Exception):
    pass


class _Injector(types.ModuleType):
    """What `megatron.core.fault_injector` takes from nvidia-resiliency-ext: an error in the training thread, wherever
    it is by then. It is repeated, since Python drops one that meets a destructor."""

    def __init__(self) -> None:
        super().__init__("nvidia_resiliency_ext.shared_utils.inject_fault")
        self.Fault = enum.Enum("Fault", ["ASYNC_EXC"])
        self.stopped = threading.Event()
        self.maybe_raise_workload_exception = lambda: None

    def clear_workload_exception(self) -> None:
        self.stopped.clear()

    def dispatch_fault_injection(self, fault: enum.Enum, delay: float, callback: None) -> None:
        """Raise an error in the main thread after ``delay`` seconds, and every second from then on."""
        thread = ctypes.c_ulong(threading.main_thread().ident or 0)

        def inject() -> None:
            wait = delay
            while not self.stopped.wait(wait):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_InjectedError))
                wait = 1.0

        threading.Thread(target=inject, daemon=True).start()


@pytest.mark.newest
@pytest.mark.slow
@ranks(2, timeout=200)
def test_megatrons_own_fault_injector() -> None:
    """Its asynchronous error comes in a forward, in a backward, and while a transfer is awaited."""
    sys.modules["nvidia_resiliency_ext"] = types.ModuleType("nvidia_resiliency_ext")
    sys.modules["nvidia_resiliency_ext.shared_utils"] = types.ModuleType(
        "nvidia_resiliency_ext.shared_utils"
    )
    injector = sys.modules["nvidia_resiliency_ext.shared_utils.inject_fault"] = _Injector()
    sys.modules.pop("megatron.core.fault_injector", None)
    import restarts
    import tiny_gpt
    import torch
    from megatron.core import fault_injector

    from megatron_hecate.comm.transfer import Transfer

    on_cpu = {name: getattr(torch, name) for name in ("full", "float64", "cuda")}
    fault_injector.torch = types.SimpleNamespace(device=lambda *_: torch.device("cpu"), **on_cpu)

    case = tiny_gpt.Case(accumulate=2)
    restarts.new_attempt(case)
    expected = tiny_gpt.train(case, steps=restarts.STEPS).losses
    errors: list[Any] = []
    first = None

    def hang(*_: Any) -> None:
        for _ in range(1_000):
            time.sleep(0.01)
        raise AssertionError("no fault came")

    def hang_at(run: Any, place: str) -> Any:
        """Both ranks stand still there when the fault comes: gloo, unlike NCCL, cannot be interrupted."""
        layer = tiny_gpt.moe_layers(run.chunks)[1]
        if place == "forward":
            layer.experts.register_forward_pre_hook(hang)
        elif place == "backward":
            layer.register_full_backward_hook(hang)
        return (
            mock.patch.object(Transfer, "wait", hang)
            if place == "wait"
            else contextlib.nullcontext()
        )

    for place in ("forward", "backward", "wait"):
        restarts.new_attempt(case)
        run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
        first = first or restarts.left()
        config = fault_injector.FaultInjectorConfig(
            fault_injector_ranks="0,1",
            fault_injector_fault_types="async_exc",
            fault_injector_fault_delay=0.5,
        )
        with pytest.raises(_InjectedError) as error, hang_at(run, place):
            fault_injector.setup_fault_injection(config)
            run.step(2)
        injector.stopped.set()
        errors.append(error)  # with its traceback
    restarts.new_attempt(case)
    ours = tiny_gpt.train(case, steps=restarts.STEPS, hook=tiny_gpt.fssdp_hook())
    assert ours.losses == pytest.approx(expected, rel=1e-5) and ours.replicas > 0
    _check_flat("fault injector", first, restarts.left())
