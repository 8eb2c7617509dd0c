"""Collectives that NCCL has and gloo has not, or not well: for `megatron_on_cpu` and `run_on_shared_gpu`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


def uneven_all_gather() -> None:
    """gloo refuses an all-gather of unequal tensors, which NCCL emulates and expert tensor parallelism needs."""
    original = dist.all_gather

    def all_gather(
        tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
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
        return _Works(
            group._allgather_base(o, i, one) for o, i in zip(outputs, inputs, strict=True)
        )

    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, all_gather_single_coalesced)


# The first argument of each is its output.
COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "_all_gather_base", "_reduce_scatter_base",
)  # fmt: skip


def collectives_through_the_host() -> None:
    """Have collectives of tensors on a GPU copy them to the host and back: gloo's own for CUDA crash in places.

    They are done when the call returns. Call before the first import of megatron, which keeps references to them.
    """
    for name in COLLECTIVES:
        if hasattr(dist, name):
            collective = _through_the_host(getattr(dist, name))
            setattr(dist, name, collective)
            setattr(dist.distributed_c10d, name, collective)
    dist._coalescing_manager = dist.distributed_c10d._coalescing_manager = _one_by_one


def _through_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    output = next(iter(signature.parameters))

    @torch.no_grad()  # parameters are broadcast in place
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        tensors = given[output] if isinstance(given[output], list) else [given[output]]
        if not any(tensor.is_cuda for tensor in tensors):
            return original(*args, **kwargs)
        wanted = given.pop("async_op", False)
        on_host = {name: _on_host(value) for name, value in given.items()}
        work = original(**on_host, async_op=True)
        if work is not None:  # this rank is in the group
            work.wait()
            results = on_host[output] if isinstance(on_host[output], list) else [on_host[output]]
            for tensor, result in zip(tensors, results, strict=True):
                tensor.copy_(result)
        return work if wanted else None

    return collective


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return [_on_host(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _one_by_one(*args: Any, **kwargs: Any) -> Iterator[_Works]:
    """Instead of torch's coalescing manager: each collective in it is done at once."""
    yield _Works()
