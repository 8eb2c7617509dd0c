"""A job restarts in its process after an error, as with nvidia-resiliency-ext: new process groups, and a new model.

Oracle: stock Megatron, which trains on or is disturbed alike; and what this process held early, while its first attempt
trained.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import checkpoints
import psutil
import pytest
import restarts
import tiny_gpt
import torch.distributed as dist
from ranks import ranks
from rehoming_hooks import rehoming_hook

from megatron_hecate.faults import attempt

ATTEMPTS = 3
ITERATIONS = 40  # of each attempt of the long run
DISTURBANCES = ("none", "forward", "backward", "evaluation", "microbatches")


def _deaths(*, held: bool, stock: bool, points: list[str], times: int) -> Iterator[tuple[str, Any]]:
    """Have attempts die at each of ``points``, so often in a row; after each, what the process held before it died.

    Args:
        held: whether the errors are kept, with their tracebacks and all that these hold.
        stock: whether attempts train without FSSDP.
        points: names in `restarts.POINTS`.
        times: attempts for each point.
    """
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
    settings = restarts.POINTS[name].settings if name in restarts.POINTS else {}
    expected = [*first.threads]
    if "record" in settings and "fssdp record" in now.threads:
        expected.append("fssdp record")
    if "observe" in settings and "fssdp progress" in expected:  # it has no watchdog
        expected.remove("fssdp progress")
    assert sorted(expected) == now.threads, (name, now.threads)
    # more where homes move
    assert now.groups <= first.groups + name.startswith("while"), (name, now.groups)


@ranks(2, timeout=200)
def test_wherever_an_attempt_dies_the_next_one_trains() -> None:
    """Everything of the attempts before is still referenced."""
    found = list(_deaths(held=True, stock=False, points=[*restarts.POINTS], times=1))
    for name, left in found:
        _check_flat(name, found[0][1], left)
    with mock.patch.object(attempt, "LINGER", 0.5):  # and without a next attempt
        dist.destroy_process_group()
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("fssdp")]
        for thread in ours:
            thread.join(20)
    assert ours and not any(thread.is_alive() for thread in ours)
    # which the rank destroys
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.slow
@ranks(2, timeout=600)
def test_three_attempts_at_each_point() -> None:
    """Threads and groups are flat; Megatron keeps models in both, and with a graph that broke off its replicas."""
    places = [name for name, point in restarts.POINTS.items() if point.stock]
    stock = list(_deaths(held=False, stock=True, points=places, times=ATTEMPTS))
    ours = []
    for name, left in _deaths(held=False, stock=False, points=[*restarts.POINTS], times=ATTEMPTS):
        ours.append((name, left))
        _check_flat(name, ours[0][1], left)
        gc.collect()
    kept_by_stock, kept = (
        max(c.tensors - b.tensors for (_, b), (_, c) in zip(s[1::3], s[2::3], strict=True))
        for s in (stock, ours)
    )
    assert kept <= 1.5 * kept_by_stock, (kept, kept_by_stock)


@dataclasses.dataclass
class _LongRun:
    """Two attempts with disturbances that a seed decides; the second one loads the checkpoint of the first."""

    losses: list[float] = dataclasses.field(default_factory=list)
    replicas: int = 0
    # what this process held after 10 iterations of each attempt and after its last one, with its resident bytes
    held: list[tuple[restarts.Left, int]] = dataclasses.field(default_factory=list)

    def train(self, case: Any, hook: Any, folder: Path) -> None:
        choose = random.Random(7)
        for begin in (0, ITERATIONS):
            restarts.new_attempt(case)
            run = tiny_gpt.train(case, steps=0, hook=hook)
            if begin:
                checkpoints.load(run, folder)
            for iteration in range(begin, begin + ITERATIONS):
                self._step(case, run, iteration, choose.choice(DISTURBANCES))
                if iteration + 1 - begin in (10, ITERATIONS):
                    gc.collect()
                    self.held.append((restarts.left(), psutil.Process().memory_info().rss))
            self.replicas += run.replicas
            if not begin:
                checkpoints.save(run, folder)

    def _step(self, case: Any, run: Any, iteration: int, what: str) -> None:
        count = 1 + iteration % 3 if what == "microbatches" else 2
        tiny_gpt.set_num_microbatches(case, count)
        layer = tiny_gpt.moe_layers(run.chunks)[iteration % 2]
        if what == "evaluation":
            run.evaluate(iteration, 1)
        elif what in ("forward", "backward"):
            register = layer.router.register_forward_hook
            if what == "backward":
                register = layer.register_full_backward_hook
            fault = register(restarts.fail)
            with pytest.raises(restarts.DeathError):
                run.step(iteration, count)
            fault.remove()
        self.losses.append(run.step(iteration, count))


@pytest.mark.slow
@ranks(2, timeout=580)
def test_a_long_disturbed_run_is_stocks_and_holds_no_more() -> None:
    """Exceptions, evaluation, other numbers of microbatches, a restart; homes move every 3 iterations."""
    case = tiny_gpt.Case(accumulate=2, distributed_optimizer=True)
    stock, ours = _LongRun(), _LongRun()
    stock.train(case, None, checkpoints.shared_folder("stock"))
    hook = rehoming_hook(slots=2, record=f"{os.environ['TEST_FOLDER']}/run")
    ours.train(case, hook, checkpoints.shared_folder("ours"))
    assert ours.replicas > 0 and ours.losses == pytest.approx(stock.losses, rel=1e-5)
    first = ours.held[0][0]
    for (early, resident), (late, resident_late) in zip(
        ours.held[::2], ours.held[1::2], strict=True
    ):
        for left in (early, late):
            assert (left.threads, left.groups) == (first.threads, first.groups)
        assert late.files <= early.files + 2
        # the registry of transfers has a bound of its own
        more = Counter(late.objects) - Counter(early.objects)
        assert sum(n for name, n in more.items() if name not in ("_Call", "_UnderWay")) <= 20, more
        assert late.tensors <= early.tensors + 100_000
        assert resident_late - resident < 16 << 20
