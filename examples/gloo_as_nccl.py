"""Replace collectives that gloo lacks, or breaks, for `megatron_on_cpu` and `run_on_shared_gpu`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


def uneven_all_gather() -> None:
    """Emulate the all-gather of unequal tensors by an all-to-all.

    gloo refuses it, NCCL emulates it, and expert tensor parallelism needs it.
    """
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
    """Works that are waited for together."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def one_all_gather_each() -> None:
    """Replace the coalesced all-gather by single ones.

    gloo's corrupts the heap now and then when the next one is queued while it runs.
    """

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
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "_all_gather_base",
    "_reduce_scatter_base",
)


def collectives_through_the_host() -> None:
    """Run collectives on copies in host memory; gloo's own for CUDA tensors crash in places.

    A collective is complete when the call returns. Call this before the first import of megatron,
    which keeps references to the collectives.
    """
    for name in COLLECTIVES:
        if hasattr(dist, name):
            collective = _through_the_host(getattr(dist, name))
            setattr(dist, name, collective)
            setattr(dist.distributed_c10d, name, collective)
    dist._coalescing_manager = dist.distributed_c10d._coalescing_manager = _one_by_one


def _through_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective so that CUDA tensors are copied to the host and back."""
    signature = inspect.signature(original)
    output = next(iter(signature.parameters))

    # Parameters, which are leaves with gradients, are broadcast in place.
    @torch.no_grad()
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        tensors = _as_list(given[output])
        if not any(tensor.is_cuda for tensor in tensors):
            return original(*args, **kwargs)
        wanted = given.pop("async_op", False)
        on_host = {name: _on_host(value) for name, value in given.items()}
        work = original(**on_host, async_op=True)
        # A rank outside the group gets no work.
        if work is not None:
            work.wait()
            for tensor, result in zip(tensors, _as_list(on_host[output]), strict=True):
                tensor.copy_(result)
        return work if wanted else None

    return collective


def _as_list(value: Any) -> list[Any]:
    """Return a list as it is, and one tensor as a list of one."""
    return value if isinstance(value, list) else [value]


def _on_host(value: Any) -> Any:
    """Copy a tensor, or a list of tensors, to the host; other arguments pass."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, list):
        return [_on_host(item) for item in value]
    return value


@contextlib.contextmanager
def _one_by_one(*args: Any, **kwargs: Any) -> Iterator[_Works]:
    """Replace torch's coalescing manager: each collective in it completes at once."""
    yield _Works()
