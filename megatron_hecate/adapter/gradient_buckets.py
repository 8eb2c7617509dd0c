"""Gradient buckets of experts are reduced in one order on all ranks.

With ``overlap_grad_reduce`` Megatron's DDP starts a bucket's reduction when its last gradient is ready. In a layer with
replicas the homes' gradients are ready later, and all at once. Ranks that share gradients belong to different
expert-parallel groups, which plan differently: each would start its reductions in an order of its own, and gradients of
different experts would be added up. So a bucket waits until those before it have started. PyTorch's DDP does the same
(Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook


class _OrderedReduction:
    """A mixin of Megatron's bucket groups: a reduction starts after that of the group before."""

    before: _OrderedReduction | None
    after: _OrderedReduction | None
    started = False
    _held: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def start_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's, now or when the groups before have started."""
        self._held = (args, kwargs)
        group: _OrderedReduction | None = self
        while group is not None and group._held is not None and (group.before is None or group.before.started):
            (args, kwargs), group._held = group._held, None
            super(_OrderedReduction, group).start_grad_sync(*args, **kwargs)  # type: ignore[misc]
            group.started, group = True, group.after

    def reset(self) -> None:
        """A new iteration begins."""
        super().reset()  # type: ignore[misc]
        self.started, self._held = False, None


def keep_bucket_order(chunks: Iterable[Module], undo: contextlib.ExitStack) -> Callable[[], None]:
    """Watch for the DDP that will wrap ``chunks``, however deep. What is returned orders its experts' buckets: to be
    called before the first backward; later calls do nothing."""
    around = weakref.WeakSet(chunks)

    def registered(module: Module, _: str, part: Module | None) -> None:
        if part in around:
            around.add(module)

    def order() -> None:
        watch.remove()
        for module in around:
            if isinstance(module, DistributedDataParallel) and module.ddp_config.overlap_grad_reduce:
                groups = module.expert_parallel_bucket_groups
                kinds = {
                    base: type(f"Ordered{base.__name__}", (_OrderedReduction, base), {}) for base in map(type, groups)
                }
                for group, before, after in zip(groups, [None, *groups], [*groups[1:], None], strict=False):
                    group.before, group.after, group.__class__ = before, after, kinds[type(group)]
        around.clear()

    watch = register_module_module_registration_hook(registered)
    undo.callback(watch.remove)
    return order
