"""Gradient buckets of experts are reduced in one order on all ranks.

With ``overlap_grad_reduce`` Megatron's DDP starts a bucket's reduction when its last gradient is ready. In a layer with
replicas the homes' gradients are ready later, and all at once. Ranks that share gradients belong to different
expert-parallel groups, which plan differently: each would start its reductions in an order of its own, and gradients of
different experts would be added up. So a bucket waits until those before it have started. PyTorch's DDP does the same
(Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import DistributedDataParallel


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


def order_buckets(ddp: DistributedDataParallel) -> None:
    """Reduce the experts' buckets of ``ddp`` in one order on all ranks."""
    groups = ddp.expert_parallel_bucket_groups
    kinds = {base: type(f"Ordered{base.__name__}", (_OrderedReduction, base), {}) for base in map(type, groups)}
    for group, before, after in zip(groups, [None, *groups], [*groups[1:], None], strict=False):
        group.before, group.after, group.__class__ = before, after, kinds[type(group)]
