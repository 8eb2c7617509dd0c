"""Collectives that NCCL has and gloo has not, or not well: for `megatron_on_cpu`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def uneven_all_gather() -> None:
    """gloo refuses an all-gather of unequal tensors, which NCCL emulates and expert tensor parallelism needs."""
    original = dist.all_gather

    def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({t.shape for t in tensors}) <= 1:
            return original(tensors, tensor, group=group, async_op=async_op)
        assert not async_op
        rows = [t.shape[0] for t in tensors]
        out = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        copies = torch.cat([tensor] * len(tensors)).contiguous()
        dist.all_to_all_single(out, copies, rows, [tensor.shape[0]] * len(tensors), group=group)
        for t, part in zip(tensors, out.split(rows), strict=True):
            t.copy_(part)
        return None

    dist.all_gather = dist.distributed_c10d.all_gather = all_gather


class _Works(list[dist.Work]):
    def wait(self) -> None:
        for work in self:
            work.wait()


def one_all_gather_each() -> None:
    """gloo's coalesced all-gather corrupts the heap now and then when the next one is queued while it runs."""

    def all_gather_single_coalesced(
        group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> _Works:
        one = dist.distributed_c10d.AllgatherOptions()
        one.asyncOp = True
        return _Works(group._allgather_base(o, i, one) for o, i in zip(outputs, inputs, strict=True))

    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, all_gather_single_coalesced)
