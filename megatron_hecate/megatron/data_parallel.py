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
parameter buffer. Only within one call of a schedule can no weight change.
`DataParallel.schedule_call` numbers the calls of schedules: each begins with ``no_sync``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook

from megatron_hecate.megatron.events import GradientEvents, StepEvents
from megatron_hecate.megatron.gradient_buckets import order_buckets


class _ObservedDDP:
    """Mixin in front of Megatron's DDP that reports gradient events.

    Attributes:
        fssdp_events: receiver of the events.
        fssdp_chunk: index of the wrapped model chunk.
        fssdp_no_syncs: times that ``no_sync`` was entered.
    """

    fssdp_events: GradientEvents
    fssdp_chunk: int
    fssdp_no_syncs: int = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.fssdp_no_syncs += 1
        with super().no_sync():  # type: ignore[misc]
            yield
        # not after an exception: other ranks may not reach this point
        if not _in_schedule():
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
        self.fssdp_events.gradients_dropped()
        super().zero_grad_buffer()  # type: ignore[misc]


class _NoSync:
    """``config.no_sync_func`` for schedules where DDP does not reduce during the backward.

    Megatron sets it only with ``overlap_grad_reduce``. A copied or pickled configuration holds
    ``None`` in its place: it belongs to another model, or to none.
    """

    # Megatron-Bridge's exports copy whatever a configuration holds, and set the attributes of the
    # copies, which ``None`` has not: slots are no such attributes.
    __slots__ = ("_ddps",)

    def __init__(self, ddps: Sequence[DistributedDataParallel]) -> None:
        # weak, as a configuration may outlive its model
        self._ddps = [weakref.ref(ddp) for ddp in ddps]

    def holds(self, ddp: DistributedDataParallel) -> bool:
        """Whether it enters ``no_sync`` of ``ddp``."""
        return any(reference() is ddp for reference in self._ddps)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for reference in self._ddps:
                ddp = reference()
                if ddp is not None:
                    stack.enter_context(ddp.no_sync())
            yield

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class DataParallel(StepEvents):
    """DDP around each model chunk, detected when DDP wraps the chunk at any depth.

    Args:
        chunks: model chunks, not wrapped yet.
        events: receiver of their gradient events.
        undo: stack that gets the callbacks which undo the conversion.
        orders: whether replicas may make buckets of experts ready in another order than on other
            ranks.
    """

    def __init__(
        self,
        chunks: Sequence[Module],
        events: GradientEvents,
        undo: contextlib.ExitStack,
        *,
        orders: bool,
    ) -> None:
        self._chunks = [weakref.ref(chunk) for chunk in chunks]
        self._ddps: list[weakref.ref[DistributedDataParallel] | None] = [None] * len(chunks)
        self._events = events
        self._orders = orders
        # weak, because the hook outlives a model that never trains
        reference = weakref.ref(self)

        def note_part(module: Module, _: str, part: Module | None) -> None:
            listener = reference()
            if listener is not None and part is not None:
                listener.part_added(module, part)

        self._watch = register_module_module_registration_hook(note_part)
        undo.callback(self._watch.remove)

    def part_added(self, module: Module, part: Module) -> None:
        """Convert ``module`` if it is a DDP and ``part``, which it wraps, holds a chunk."""
        if not isinstance(module, DistributedDataParallel) or isinstance(module, _ObservedDDP):
            return
        parts = set(part.modules())
        for index, chunk in enumerate(self._chunks):
            if chunk() in parts:
                module.__class__ = _observed(type(module))
                module.fssdp_events = self._events
                module.fssdp_chunk = index
                self._ddps[index] = weakref.ref(module)

    def iteration_begins(self, iteration: int) -> None:
        """Order buckets of experts before the first backward."""
        self._watch.remove()
        self.set_no_sync_func()
        if self._orders:
            for ddp in self._wrappers():
                order_buckets(ddp)
        self._orders = False

    def set_no_sync_func(self) -> None:
        """Set ``no_sync_func`` where the loop left it ``None`` or reset it to ``None``."""
        ddps = self._wrappers()
        for ddp in ddps:
            if not ddp.ddp_config.overlap_grad_reduce and ddp.config.no_sync_func is None:
                ddp.config.no_sync_func = _NoSync(ddps)

    def wants_gradients(self, chunk: int) -> bool | None:
        """Whether DDP reduces after the running backward of ``chunk``; ``None`` without DDP."""
        ddp = self._ddp(chunk)
        if ddp is None:
            return None
        # no generator, because every layer asks in every backward
        for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
            if not group.is_last_microbatch:
                return False
        return True

    def schedule_call(self, chunk: int) -> int | None:
        """Identify the schedule's call that runs the current forward of ``chunk``.

        Returns:
            The number, or ``None`` where two forwards cannot be attributed to one call: without
            DDP, in loops without Megatron's schedules, and outside of any ``no_sync`` where
            ``no_sync_func`` is not this DDP's, because the loop replaced it or two models share a
            configuration.
        """
        ddp = self._ddp(chunk)
        if ddp is None or not _in_schedule():
            return None
        if self.wants_gradients(chunk) and not _enters_no_sync(ddp.config.no_sync_func, ddp):
            return None
        return ddp.fssdp_no_syncs

    def _wrappers(self) -> list[DistributedDataParallel]:
        ddps = [self._ddp(chunk) for chunk in range(len(self._ddps))]
        return [ddp for ddp in ddps if ddp is not None]

    def _ddp(self, chunk: int) -> DistributedDataParallel | None:
        reference = self._ddps[chunk]
        if reference is None:
            return None
        return reference()


@functools.cache
def _observed(base: type) -> type:
    return type(f"FSSDP{base.__name__}", (_ObservedDDP, base), {})


def _enters_no_sync(function: Any, ddp: DistributedDataParallel) -> bool:
    """Whether a schedule with this ``no_sync_func`` enters ``no_sync`` of ``ddp``."""
    functions = function if isinstance(function, list) else [function]
    for one in functions:
        if isinstance(one, _NoSync):
            if one.holds(ddp):
                return True
        elif getattr(one, "__self__", None) is ddp:
            return True
    return False


@functools.cache
def _schedule_codes() -> frozenset[CodeType]:
    functions = (
        schedules.forward_backward_no_pipelining,
        schedules.forward_backward_pipelining_with_interleaving,
        schedules.forward_backward_pipelining_without_interleaving,
    )
    return frozenset(inspect.unwrap(function).__code__ for function in functions)


def _in_schedule() -> bool:
    """Whether one of Megatron's schedules is on the stack."""
    codes = _schedule_codes()
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False
