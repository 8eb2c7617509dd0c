"""What a transfer enqueues on which CUDA stream, and when, where there is no GPU: `streams_on_cpu` notes it.

Oracle: the programming model of CUDA. A stream takes work in order; with one hardware queue work that waits for another
stream (``wait``) stops whatever any stream enqueues later, so nothing may wait before `Transfer.wait` is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import streams_on_cpu
import torch
import torch.distributed as dist
from stream_order import Record, Wait, Work

from megatron_hecate.comm import transfer
from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transfer import Transfer
from megatron_hecate.comm.transport import Copy, TransferPlan
from megatron_hecate.faults import under_way

pytestmark = pytest.mark.fast
GPU = torch.device("cuda", 0)
BEGIN = ["compute records", "transfers waits for compute"]


class _Gpu:
    """A GPU whose streams note what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connections: str | None) -> None:
        for name, value in streams_on_cpu.NAMES.items():
            monkeypatch.setattr(torch.cuda, name, value)
        streams_on_cpu.issued.clear()
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        if connections is not None:
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
        transfer.transfer_stream.cache_clear()
        self.stream = transfer.transfer_stream(GPU)

    def do(self, name: str) -> None:
        streams_on_cpu.issued.append(Work(torch.cuda.current_stream().cuda_stream, name))

    @property
    def calls(self) -> list[str]:
        """Work and waits so far, by stream."""
        names = {0: "compute", self.stream.cuda_stream: "transfers"}
        recorded = {
            entry.event: names[entry.stream]
            for entry in streams_on_cpu.issued
            if isinstance(entry, Record)
        }
        words = {
            Work: lambda entry: entry.name,
            Record: lambda entry: "records",
            Wait: lambda entry: f"waits for {recorded[entry.event]}",
        }
        return [f"{names[e.stream]} {words[type(e)](e)}" for e in streams_on_cpu.issued]


@pytest.fixture(autouse=True)
def _forget_streams_and_works() -> Iterator[None]:
    yield
    transfer.transfer_stream.cache_clear()
    under_way.forget()


def _transfer(gpu: _Gpu, *, waits: bool) -> Transfer:
    def steps() -> Iterator[None]:
        gpu.do("posts")
        if waits:
            yield
            gpu.do("waits for messages")

    return Transfer(steps(), GPU, what="spAG", label="layer 1")


def test_the_stream_of_transfers_comes_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu(monkeypatch, None)
    assert gpu.stream.priority == -5, "the highest that the GPU and torch have"


@pytest.mark.parametrize("connections", [None, "1", "32"])
@pytest.mark.parametrize("waits", [True, False])
def test_what_is_left_to_the_wait(
    monkeypatch: pytest.MonkeyPatch, connections: str | None, waits: bool
) -> None:
    gpu = _Gpu(monkeypatch, connections)
    one = _transfer(gpu, waits=waits)
    start = [*BEGIN, "transfers posts"]
    rest = ["transfers waits for messages"] * waits + ["transfers records"]
    assert gpu.calls == start + ([] if connections == "1" and waits else rest)
    one.wait()
    one.wait()
    assert gpu.calls == start + rest + ["compute waits for transfers"] * 2


@pytest.mark.parametrize("connections", ["1", "8"])
def test_rounds_of_messages_are_posted_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch, connections: str
) -> None:
    """Two rounds of gradients. NCCL has no tags: were the second posted at the wait, a fetch that began in between
    would take its messages."""
    gpu = _Gpu(monkeypatch, connections)
    # slime's function waits for the GPU and empties its caches where less than 3 GB are free
    monkeypatch.setattr(dist, "_coalescing_manager", lambda *_, **__: pytest.fail("slime's"))

    class _Group:  # can be a key of weak dictionaries, as process groups can
        rank, size, group_name = staticmethod(lambda: 0), staticmethod(lambda: 7), "seven"
        posted = 0

        def _get_backend(self, device: torch.device) -> Any:
            assert device.type == "cuda"
            return SimpleNamespace(supports_coalescing=True)

        def _start_coalescing(self, device: torch.device) -> None:
            self.posted = 0

        def recv(self, tensors: list, rank: int, tag: int) -> None:
            self.posted += 1

        def _end_coalescing(self, device: torch.device) -> Any:
            """One call of NCCL for all messages of a round, and one handle."""
            assert self.posted in (4, 2), "six gradients, of which four arrive at once"
            gpu.do("posts")
            return SimpleNamespace(wait=lambda: gpu.do("waits for messages"))

    group = _Group()
    p2p = P2P(group, timeout=30)  # type: ignore[arg-type]
    p2p._staging = _OnGpu(torch.zeros(8192, dtype=torch.uint8))
    monkeypatch.setattr(
        "megatron_hecate.comm.p2p.chunks_in", lambda *_: [_OnGpu(torch.zeros(4)) for _ in range(5)]
    )
    plan = TransferPlan(0, tuple(Copy(0, 0, rank, 0) for rank in range(1, 7)))
    homes = SimpleNamespace(add=lambda index, total: gpu.do("adds"))
    one = p2p.return_gradients(plan, [torch.zeros(4)], homes, label="layer 1")  # type: ignore[arg-type]
    first, second = ["transfers posts", "transfers waits for messages"], ["transfers posts"]
    rest = ["transfers waits for messages", "transfers adds", "transfers records"]
    at_once = [*BEGIN, *first, *second]
    assert gpu.calls == at_once + ([] if connections == "1" else rest)
    one.wait()
    assert gpu.calls == [*at_once, *rest, "compute waits for transfers"]


def test_both_ends_of_a_message_have_one_shape() -> None:
    """torch's ``torchfrtrace`` calls any other message of NCCL a mismatch."""
    ends: dict[str, list[torch.Size]] = {"send": [], "recv": []}

    class _Group:
        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 2)

        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(supports_coalescing=False)

        def send(self, tensors: list, rank: int, tag: int) -> Any:
            ends["send"].append(tensors[0].shape)
            return SimpleNamespace(wait=lambda timeout: None)

        def recv(self, tensors: list, rank: int, tag: int) -> Any:
            ends["recv"].append(tensors[0].shape)
            return SimpleNamespace(wait=lambda timeout: None)

    p2p = P2P(_Group(), timeout=30)  # type: ignore[arg-type]
    home = [torch.zeros(4, 6), torch.zeros(3)]
    for rank in range(2):
        plan = TransferPlan(rank, (Copy(0, 0, 1, 0),))
        p2p.fetch(plan, [home], [torch.zeros(27)], label="layer 1").wait()
    assert ends["send"] == ends["recv"] and len(ends["send"]) == 2


class _OnGpu(torch.Tensor):
    """Says that it is."""

    is_cuda = True  # type: ignore[assignment]
    device = GPU  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type, data: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, data)
