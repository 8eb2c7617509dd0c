"""Quotas of all sources at once, for simulations, tests and benchmarks."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from megatron_hecate.device.launch import Kernels
from megatron_hecate.plan import Placement
from megatron_hecate.routing.tables import GroupShape, HolderOrder


def quotas_of_all(
    loads: np.ndarray, placement: Placement, shape: GroupShape, *, bits: int | None = None
) -> tuple[np.ndarray, HolderOrder]:
    """Compute all sources' quotas on the host, by the kernels of training.

    Args:
        loads: tokens of source n routed to expert e, [N, E].
        placement: homes and replicas.
        shape: sizes and topology of the group.
        bits: width of the kernel's integers, 32 or 64; ``None`` means 32 if the tokens allow it,
            else 64, as on a GPU.

    Returns:
        [N, C] int64 tokens of each source for each holder, and the order of the holders.
    """
    order = HolderOrder(placement, shape)
    kernels = Kernels(torch.device("cpu"))
    loads = np.ascontiguousarray(loads, np.int32)
    work = np.empty(shape.work_size(1), np.int64)
    parts = np.zeros((len(loads), shape.parts_size), np.int32)
    arrays = (shape.table(), order.table(), loads, work, parts)
    *tables, out = (ctypes.c_void_p(array.ctypes.data) for array in arrays)
    solve = kernels.function("fssdp_quotas_of_all")
    solved = any(solve(*tables, width, out) for width in ([bits] if bits else [32, 64]))
    assert solved, f"{loads.sum(dtype=np.int64)} tokens are too many for {bits} bits"
    ends = parts[:, : len(order.expert)].astype(np.int64)
    tokens = np.diff(ends, axis=1, prepend=0)
    first = np.searchsorted(order.expert, np.unique(order.expert))
    tokens[:, first] = ends[:, first]
    return tokens, order
