"""Detection of an iteration's end through calls of Megatron's DDP.

In every training loop DDP reduces the gradients before the loop reads the gradients, and zeroes the
gradients before the loop accumulates new ones:

| method of DDP | called by | consequence here |
|---|---|---|
| ``no_sync`` | schedules, all microbatches but a chunk's last | gradients may stay with replicas |
| ``no_sync`` | the loop, around calls of a schedule | gradients of replicas return at its end |
| ``start_grad_sync`` | schedules, as ``grad_sync_func`` | gradients of replicas return first |
| ``finish_grad_sync`` | ``finalize_model_grads`` or the loop | the same; then the iteration ends |
| ``zero_grad_buffer`` | the loop | replicas' gradients are dropped; the iteration ends |

The bodies of these four methods are the same from megatron-core 0.16.1 to 0.20.

Weights may also change between two forwards without any such call, and no counter shows it: a
tensor's version misses ``param.data.mul_()``, foreach kernels on ``.data`` and writes to DDP's
parameter buffer. Only within one call of a schedule can no weight change. So Megatron's schedules
are wrapped, and `DataParallel.schedule_call` numbers their calls.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules

from megatron_hecate.megatron.events import GradientEvents, StepEvents
from megatron_hecate.megatron.gradient_buckets import order_buckets

# The functions that ``get_forward_backward_func`` looks up by these names in each call.
_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)


class _ScheduleCalls:
    """Calls of Megatron's schedules in this process.

    Attributes:
        running: number of the running call; ``None`` outside of calls.
        ddps: DDPs around converted chunks.
    """

    def __init__(self) -> None:
        self.running: int | None = None
        self.ddps: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._count = 0

    def count(self, schedule: Callable) -> Callable:
        """Wrap a schedule, so that its calls are counted and enter DDP's ``no_sync``."""

        @functools.wraps(schedule)
        def run(*args: Any, **kwargs: Any) -> Any:
            # a call in a forward of another one, such as of a teacher's or an evaluation's
            outer = self.running
            self._count += 1
            self.running = self._count
            try:
                with self._no_sync_funcs():
                    return schedule(*args, **kwargs)
            finally:
                self.running = outer

        return run

    @contextlib.contextmanager
    def _no_sync_funcs(self) -> Iterator[None]:
        """Set ``config.no_sync_func`` where DDP does not reduce during the backward.

        Megatron sets it only with ``overlap_grad_reduce``. It is set for the schedule alone,
        because libraries copy and pickle configurations.
        """
        configs: dict[int, Any] = {}
        for ddp in self.ddps:
            if not ddp.ddp_config.overlap_grad_reduce and ddp.config.no_sync_func is None:
                configs[id(ddp.config)] = ddp.config
        for config in configs.values():
            config.no_sync_func = functools.partial(self._enter_no_sync, config)
        try:
            yield
        finally:
            for config in configs.values():
                config.no_sync_func = None

    @contextlib.contextmanager
    def _enter_no_sync(self, config: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for ddp in [ddp for ddp in self.ddps if ddp.config is config]:
                stack.enter_context(ddp.no_sync())
            yield


_CALLS = _ScheduleCalls()


for _name in _SCHEDULES:
    setattr(schedules, _name, _CALLS.count(getattr(schedules, _name)))


class _ObservedDDP:
    """Mixin in front of Megatron's DDP that reports gradient events.

    Attributes:
        fssdp_events: receiver of the events.
        fssdp_chunk: index of the wrapped model chunk.
        fssdp_call: schedule's call in which ``no_sync`` was entered last.
    """

    fssdp_events: GradientEvents
    fssdp_chunk: int
    fssdp_call: int | None = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.fssdp_call = _CALLS.running
        with super().no_sync():  # type: ignore[misc]
            yield
        # not after an exception: other ranks may not reach this point
        if _CALLS.running is None:
            # the loop may read or change ``main_grad`` from here on
            self.fssdp_events.gradients_wanted(self.fssdp_chunk)

    def start_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        self.fssdp_events.gradients_wanted(self.fssdp_chunk)
        super().start_grad_sync(*args, **kwargs)  # type: ignore[misc]

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        self.fssdp_events.gradients_wanted(self.fssdp_chunk)
        super().finish_grad_sync(*args, **kwargs)  # type: ignore[misc]
        self.fssdp_events.gradients_reduced()

    def zero_grad_buffer(self) -> None:
        self.fssdp_events.gradients_dropped(self.fssdp_chunk)
        super().zero_grad_buffer()  # type: ignore[misc]


class DataParallel(StepEvents):
    """DDP around each chunk of a model.

    A converted chunk refers to it as ``fssdp_data_parallel``, with the chunk's index. Where a
    data-parallel class is constructed, `switch_on.entry` looks for such chunks at any depth.

    Args:
        num_chunks: number of model chunks, not wrapped yet.
        events: receiver of their gradient events.
        orders: whether replicas may make buckets of experts ready in another order than on other
            ranks.
    """

    def __init__(self, num_chunks: int, events: GradientEvents, *, orders: bool) -> None:
        # DDP around each chunk; returns ``None`` before there is one, and after its life
        self._ddps: list[Callable[[], DistributedDataParallel | None]]
        self._ddps = [lambda: None] * num_chunks
        self._events = events
        self._orders = orders

    def construct(self, kind: type[DistributedDataParallel], chunk: int) -> DistributedDataParallel:
        """Return a new DDP around ``chunk`` that reports events; its ``__init__`` has not run."""
        observed = type(f"FSSDP{kind.__name__}", (_ObservedDDP, kind), {})
        ddp = object.__new__(observed)
        vars(ddp).update(fssdp_events=self._events, fssdp_chunk=chunk)
        self._ddps[chunk] = weakref.ref(ddp)
        _CALLS.ddps.add(ddp)
        self._events.gradients_replaced()
        return ddp

    def iteration_begins(self, iteration: int) -> None:
        """Order buckets of experts before the first backward."""
        if self._orders:
            for find_ddp in self._ddps:
                if (ddp := find_ddp()) is not None:
                    order_buckets(ddp)
        self._orders = False

    def wants_gradients(self, chunk: int) -> bool | None:
        """Whether DDP reduces after the running backward of ``chunk``; ``None`` without DDP."""
        ddp = self._ddps[chunk]()
        if ddp is None:
            return None
        # no generator, because every layer asks in every backward
        for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
            if not group.is_last_microbatch:
                return False
        return True

    def schedule_call(self, chunk: int) -> int | None:
        """Return the number of the schedule's call that runs the current forward of ``chunk``.

        ``None`` without DDP, in loops without Megatron's schedules, and where the schedule enters
        no ``no_sync`` of this DDP, because the loop replaced ``no_sync_func``.
        """
        ddp = self._ddps[chunk]()
        call = _CALLS.running
        if ddp is None or (self.wants_gradients(chunk) and ddp.fssdp_call != call):
            return None
        return call
