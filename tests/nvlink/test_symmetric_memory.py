"""Torch's symmetric memory as GPUs give it, where there is no GPU: torch's functions are replaced.

Oracle: torch's sources (`CUDASymmetricMemory.cu`): what comes from the driver and not from torch's cache, that a
rendezvous may return nothing, and that it reads an environment variable each time. `test_on_gpu.py` runs the real one.
"""

from __future__ import annotations

import os
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from ranks import ranks

from megatron_hecate.nvlink.peer_memory import COUNTERS, NO_MULTICAST
from megatron_hecate.nvlink.peers import Peers
from megatron_hecate.switch_on import connect

MIB = 1 << 20
GPU = torch.device("cuda", 0)


class _Gpu:
    """A GPU with ``total`` bytes, of which torch's cache keeps ``cached``."""

    def __init__(
        self, total: int, cached: int = 0, *, backend: str = "CUDA", gives_view: bool = True
    ) -> None:
        self.total, self.cached, self.gives_view = total, cached, gives_view
        self.multicast: list[str | None] = []
        symmetric.empty, symmetric.rendezvous = self.empty, self.rendezvous
        symmetric.get_backend = lambda device: backend
        torch.cuda.empty_cache, torch.cuda.synchronize = self.empty_cache, lambda device: None
        torch.cuda.mem_get_info = lambda device: (self.total - self.cached, self.total)
        zeros = torch.zeros
        torch.zeros = lambda *size, pin_memory=False, **settings: zeros(*size, **settings)

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if size > self.total - self.cached:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.full((size,), 7, dtype=dtype)

    def empty_cache(self) -> None:
        self.cached = 0

    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        self.multicast.append(os.environ.get(NO_MULTICAST))
        pointers = [tensor.data_ptr() - 64] * group.size()
        view = types.SimpleNamespace(buffer_ptrs=pointers, rank=group.rank())
        return view if self.gives_view else None


def _peers(size: int = MIB) -> Peers:
    return Peers(dist.group.WORLD, size, device=GPU, ranks=(0, 1), timeout=20.0)


@ranks(2)
def test_what_torchs_cache_keeps_is_given_back_first() -> None:
    """On one rank of two: the other must not wait for a retry it knows nothing of."""
    gpu = _Gpu(3 * MIB, 2 * MIB + COUNTERS if dist.get_rank() else 0)
    peers = _peers()
    assert gpu.cached == 0 and peers.buffers.numel() == MIB
    assert tuple(peers.signals.progress) == (peers.buffers.data_ptr() - COUNTERS,) * 2


@ranks(2)
def test_too_little_memory_is_named_on_all_ranks() -> None:
    _Gpu(MIB // (1 + dist.get_rank()) + COUNTERS)
    free = MIB // 2 + COUNTERS
    message = (
        f"transport nvlink: rank 1: cannot allocate {MIB + COUNTERS} bytes of symmetric memory, {free} are free: CUDA "
        "driver error: out of memory; set fewer slots or a shorter lifetime, or use p2p"
    )
    with pytest.raises(RuntimeError, match=message):
        _peers()


@ranks(2)
def test_a_rendezvous_that_gives_nothing_is_named() -> None:
    _Gpu(8 * MIB, gives_view=dist.get_rank() == 0)
    message = "transport nvlink: rank 1: cannot map its peers' memory: see the warning of torch"
    with pytest.raises(RuntimeError, match=message):
        _peers()


@pytest.mark.parametrize("before", [None, "0"])
@ranks(2)
def test_multicast_is_off_for_our_memory_alone(before: str | None) -> None:
    os.environ.pop(NO_MULTICAST, None)
    if before is not None:
        os.environ[NO_MULTICAST] = before
    gpu = _Gpu(8 * MIB)
    _peers()
    assert gpu.multicast == ["1"] and os.environ.get(NO_MULTICAST) == before
    gpu.gives_view = False
    with pytest.raises(RuntimeError):
        _peers()
    assert os.environ.get(NO_MULTICAST) == before


@ranks(2)
def test_another_backend_is_named() -> None:
    """When memory is allocated, and before that when a transport is chosen."""
    _Gpu(8 * MIB, backend="NVSHMEM" if dist.get_rank() else "CUDA")
    text = r"cannot use symmetric memory of torch's backend CUDA: this process uses NVSHMEM; unset TORCH_SYMMMEM"
    with pytest.raises(RuntimeError, match=f"transport nvlink: rank 1: {text}"):
        _peers()
    connect.device_of_rank = lambda: GPU
    connect.nvlink_domain = lambda node: (node, "")
    connect.TransferKernels = lambda device: None
    found: list[str] = []
    connection = connect.connect("nvlink", (0, 1), found, timeout=20.0)
    assert connection.transport is None and len(found) == 1 and text.replace("\\", "") in found[0]
