"""Calls of CUDA's driver and NVML, where there is no GPU. Oracle: their documentation."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_hecate.device import launch
from megatron_hecate.nvlink import peers
from megatron_hecate.nvlink.launch import UNDER_WAY, TransferKernels

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(torch.cuda.is_available(), reason="would run on the GPU"),
]
ONE_GPU = types.SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_device_properties=lambda _: types.SimpleNamespace(uuid="12"),
)


def _domain(monkeypatch: pytest.MonkeyPatch, fabric: Callable[[str], Any]) -> str:
    """Of a GPU about which NVML says what ``fabric`` does."""
    nvml = types.SimpleNamespace(
        init_v2=lambda: None,
        device_get_handle_by_uuid={"GPU-12": "a handle"}.__getitem__,
        device_get_gpu_fabric_info_v=fabric,
        GpuFabricState=types.SimpleNamespace(COMPLETED=3),
    )
    monkeypatch.setattr(pytest.importorskip("cuda.bindings"), "nvml", nvml, raising=False)
    monkeypatch.setattr(peers.torch, "cuda", ONE_GPU)
    domain, against = peers.nvlink_domain("node a")
    assert against == ""
    return domain


def test_machines_of_one_fabric_are_one_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's own switches report a cluster of zeros; a fabric in state 1 is not ready."""
    cluster = bytes(range(16))
    for state, uuid, domain in (
        (3, cluster, f"fabric {cluster.hex()} 7"),
        (3, bytes(16), "node a"),
        (1, b"one", "node a"),
    ):
        info = types.SimpleNamespace(state=state, cluster_uuid=uuid, clique_id=7)
        assert _domain(monkeypatch, lambda _, info=info: info) == domain


def test_a_driver_that_cannot_say_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a GPU that is too old to be asked."""
    unsupported = pytest.importorskip("cuda.bindings.nvml").NotSupportedError

    def ask(handle: str) -> Any:
        raise unsupported.__new__(unsupported)

    assert _domain(monkeypatch, ask) == "node a"


@pytest.mark.newest
def test_calls_reach_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver they end there, and not before."""
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(cuda_stream=0x10)
    )
    monkeypatch.setattr(launch, "_load_for_gpu", lambda device: lambda name: 0x20)
    _gpu_of(monkeypatch, (9, 0), 132)
    kernels, at = TransferKernels(torch.device("cuda", 0)), torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="driver"):
        kernels.run("fssdp_gather", at, position=1, away=False, ranks=2)


def _gpu_of(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], multiprocessors: int
) -> None:
    properties = types.SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "copies", "sums"),
    [
        pytest.param((9, 0), 132, 16, 32, id="H100"),
        pytest.param((8, 0), 108, 11, 22, id="A100"),
        pytest.param((10, 0), 148, 32, 64, id="B200"),
        pytest.param((12, 0), 188, 32, 64, id="newer, and larger"),
        pytest.param((9, 0), 66, 8, 16, id="half of an H100"),
        pytest.param((9, 0), 16, 2, 4, id="1g of an H100"),
        pytest.param((8, 0), 14, 2, 3, id="1g of an A100"),
        pytest.param((10, 0), 8, 2, 4, id="5 % of a B200 by MPS"),
        pytest.param((9, 0), 8, 1, 2, id="6 % by MPS"),
        pytest.param((9, 0), 7, None, None, id="5 % by MPS"),
    ],
)
def test_blocks_fill_the_link_and_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    multiprocessors: int,
    copies: int | None,
    sums: int | None,
) -> None:
    """On whole GPUs and parts of one: half of the multiprocessors are left for what peers wait for. As many bytes are
    asked for as NVLink carries in 2 us: 300, 450, 900 GB/s, by processes that share a GPU as many together."""
    _gpu_of(monkeypatch, capability, multiprocessors)
    monkeypatch.setattr(launch, "_load_for_gpu", lambda device: 0x30)
    if copies is None:
        found = f"needs 8 multiprocessors of a GPU, this process has {multiprocessors} .*MIG.*MPS.*or use p2p"
        with pytest.raises(RuntimeError, match=found):
            TransferKernels(torch.device("cuda"))
        return
    blocks = TransferKernels(torch.device("cuda")).blocks
    assert blocks == {"gather": copies, "reduce": sums}
    assert max(blocks.values()) <= multiprocessors / 2
    rate, whole = {8: (300e9, 108), 9: (450e9, 132)}.get(capability[0], (900e9, 148))
    carried = min(multiprocessors / whole, 1) * rate * 2e-6
    assert all(count * UNDER_WAY[name] >= carried for name, count in blocks.items())


def test_the_peers_meet_before_many_blocks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of a transfer, in order: blocks and threads of each. 72 ranks are an NVL72."""
    launched = []
    _gpu_of(monkeypatch, (9, 0), 132)
    monkeypatch.setattr(launch, "_load_for_gpu", lambda device: 0x30)
    kernels = TransferKernels(torch.device("cuda"))
    monkeypatch.setattr(
        kernels,
        "launch",
        lambda name, *_, blocks, threads: launched.append((name, blocks, threads)),
    )
    name, description = "fssdp_reduce_16_32", torch.zeros(8, dtype=torch.uint8)
    for ranks in (2, 72):
        kernels.run(name, description, position=1, away=False, ranks=ranks)
    assert launched == [
        *(("fssdp_synchronize", 1, 32), (name, 32, 256)),
        *(("fssdp_synchronize", 1, 96), (name, 32, 256)),
    ]
