"""The capture emulator catches and names every planted fault. Oracle: literal messages.

That a replay does what its lines do is shown by `test_cuda_graphs`, bitwise.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import graphs_on_cpu
import megatron_on_cpu
import numpy as np
import pytest
import torch
import torch.distributed as dist
from graph_calls import first_difference
from graph_capture import Graph, not_in_graphs, one_kernel
from ranks import ranks
from streams_on_cpu import CaptureError

pytestmark = pytest.mark.newest


# faults: how a scope goes wrong, and what the message says besides this file's name and the function's


def _mask_of_a_tensor(x: Any) -> Any:
    y = x.clone()
    y[x > 0] = x[x > 0]
    return y


def _in_the_backward(x: Any) -> Any:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * grad.max().item()

    y = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(Scale.apply(y).sum(), y)
    return grad


def _number_of_the_device(x: Any) -> Any:
    sizes = torch.tensor([2, 2])  # on the host alone this is fine
    return x * sizes.sum().item() * x.sum().item()


def _from_numpy(x: Any) -> Any:
    table = torch.empty_like(x)
    table.copy_(torch.from_numpy(np.arange(4, dtype=np.float32)), non_blocking=True)
    return x + table


def _wait_for_an_event(x: Any) -> Any:
    torch.cuda.current_stream().record_event().synchronize()
    return x * 2


def _other_stream(x: Any) -> Any:
    with torch.cuda.stream(torch.cuda.Stream()):
        return x * 2


def _never_joined(x: Any) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    return y


def _earlier_work(x: Any) -> Any:
    torch.cuda.current_stream().wait_event(BEFORE["event"])
    return x * 2


def _timed(x: Any) -> Any:
    event = torch.cuda.current_stream().record_event()
    return x * event.elapsed_time(event)


def _counted(x: Any) -> Any:
    BEFORE["counter"].count()
    return x * 2


BEFORE: dict[str, Any] = {}  # what the faults find from before the capture
DATA = [1.0, 2.0, 3.0, 4.0]
WAITS = "aten._local_scalar_dense.default waits for the device"
SHAPED = "has a shape that depends on data"
FAULTS: list[tuple[Callable, str]] = [
    (lambda x: x * x.sum().item(), WAITS),
    (lambda x: x + 1 if x[0] > 0 else x, WAITS),
    (lambda x: x * sum(x.tolist()), "Tensor.tolist copies from the device"),
    (lambda x: x.to("cpu") * 2, "Tensor.to copies from the device"),
    (lambda x: x[x > 0], "aten.index.Tensor with a mask"),
    (_mask_of_a_tensor, "aten.index.Tensor with a mask"),
    (lambda x: x.nonzero() * 2, f"aten.nonzero.default {SHAPED}"),
    (lambda x: x.repeat_interleave((x > 0).long()), f"aten.repeat_interleave.Tensor {SHAPED}"),
    (_in_the_backward, WAITS),
    (
        lambda x: x * torch.tensor(DATA),
        "aten.mul.Tensor copies a tensor made of Python data to the device",
    ),
    (_number_of_the_device, WAITS),
    (lambda x: x * torch.tensor(DATA, device="cuda"), "tensor copies Python data to the device"),
    (_from_numpy, "aten.copy_.default copies a tensor made of Python data to the device"),
    (lambda x: x[[0, 2]] * 2, "memory that a graph uses was freed"),
    (lambda x: torch.cuda.synchronize() or x * 2, "torch.cuda.synchronize makes the host wait"),
    (_wait_for_an_event, "Event.synchronize makes the host wait"),
    (_other_stream, "work on a stream that has not joined the capture"),
    (_never_joined, "nothing waited for its last work"),
    (_earlier_work, "waits for work from outside the capture"),
    (_timed, "Event.elapsed_time makes the host wait"),
    (_counted, "Counter.count ran inside a capture"),
    (lambda x: torch.zeros(4, pin_memory=True) + x, "zeros allocates pinned memory"),
    (lambda x: x.pin_memory() * 2, "Tensor.pin_memory ran inside a capture"),
]


@ranks(1)
def test_every_planted_fault_is_caught_and_named() -> None:
    class Counter:
        def count(self) -> None: ...

    graphs_on_cpu.install()
    not_in_graphs(Counter, "count")
    BEFORE.update(event=torch.cuda.Stream().record_event(), counter=Counter())
    for fault, message in FAULTS:
        x = torch.arange(4.0)
        fault(x)  # right without a graph
        with pytest.raises(CaptureError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
            fault(x)
        text = str(caught.value)
        assert message in text, (fault.__name__, text)
        if fault is not _never_joined:
            assert "test_graph_capture.py" in text and fault.__name__ in text, text
        assert Graph.current is None and not torch.cuda.is_current_stream_capturing()


def _captured(body: Callable[[], Any]) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


LAUNCHED: list[str] = []  # kernels that ran


def _launch(name: str, source: Any, number: int = 0) -> None:
    from megatron_hecate.device.launch import Kernels

    kernels = SimpleNamespace(on_gpu=False, function=lambda name: lambda *_: LAUNCHED.append(name))
    arguments = ctypes.c_void_p(source.data_ptr()), ctypes.c_uint(number)
    Kernels.launch(kernels, name, *arguments, blocks=1, threads=1)


@ranks(1)
def test_events_of_a_capture_and_streams_of_before_are_named() -> None:
    megatron_on_cpu.install()
    earlier, earlier_event = torch.cuda.Stream(), torch.cuda.Event()
    graphs_on_cpu.install()
    event, external = torch.cuda.Event(), torch.cuda.Event(external=True)
    _captured(lambda: (event.record(), external.record()))
    stream = torch.cuda.current_stream()
    for use, message in (
        (event.query, "Event.query asks for an event that was recorded inside a capture"),
        (event.synchronize, "Event.synchronize asks for an event that was recorded"),
        (lambda: stream.record_event().elapsed_time(event), "Event.elapsed_time asks for an event"),
        (lambda: stream.wait_event(event), "a stream waits for an event that was recorded inside"),
        (lambda: stream.wait_event(earlier_event), "_Event.number, made before streams were told"),
        (lambda: stream.wait_stream(earlier), "_Stream.record_event, made before streams"),
        (lambda: earlier.wait_stream(stream), "_Stream.wait_stream, made before streams"),
    ):
        with pytest.raises(CaptureError, match=f"^{message}.*test_graph_capture.py"):
            use()
    event.record()
    assert event.query() and external.query()


@ranks(1)
def test_kernels_run_as_a_gpus_would() -> None:
    graphs_on_cpu.install()
    x, seen = torch.tensor([1.0, -2.0, 3.0, -4.0]), torch.zeros(2)

    @one_kernel
    def packed(x: Any, seen: Any) -> Any:
        """It looks at data in the middle, and writes to an argument."""
        dist.all_reduce(seen, async_op=True).wait()
        seen[0] += sum(x.tolist())
        kept = x[x > 0]
        return torch.cat([kept, kept.new_zeros(len(x) - len(kept))])

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = packed(x, seen) * 2
        more = torch.empty(0).set_(x.untyped_storage(), 0, (4,), (1,)) + 1
        _launch("fssdp_gather", x)
        _launch("fssdp_count", x)
    names = ["aten.mul.Tensor", "aten.add.Tensor", "kernel fssdp_gather", "kernel fssdp_count"]
    assert [call.name for call in graph.calls] == [packed.__qualname__, *names]
    # a capture leaves nothing behind, and follows no table
    assert x.tolist() == [1.0, -2.0, 3.0, -4.0] and seen.tolist() == [0.0, 0.0]
    assert kept.isnan().all() and LAUNCHED == ["fssdp_count"]
    x.copy_(torch.tensor([-1.0, 5.0, -6.0, -7.0]))
    graph.replay()
    assert kept.tolist() == [10.0, 0.0, 0.0, 0.0] and seen.tolist() == [-9.0, 0.0]
    assert more.tolist() == [0.0, 6.0, -5.0, -6.0]
    assert LAUNCHED == ["fssdp_count", "fssdp_gather", "fssdp_count"]
    graph = _captured(lambda: one_kernel(lambda x: x[x > 0])(x))
    x.fill_(1.0)
    with pytest.raises(CaptureError, match=r"another shape .*<lambda> called at .*test_graph_capt"):
        graph.replay()


@ranks(1)
def test_the_first_difference_of_two_captures_is_named() -> None:
    graphs_on_cpu.install()
    x = torch.arange(4.0)

    def body(change: str) -> None:
        y, z = x.clone(), x[int(change == "address") :][:2].clone()
        y.mul_(3 if change == "argument" else 2)
        (z if change == "memory" else y).add_(1)
        y[: 3 if change == "shape" else 2].add_(torch.tensor(3.0 if change == "number" else 2.0))
        if change != "fewer":
            _launch("fssdp_count", y if change == "pointer" else z, int(change == "launch"))

    first = _captured(lambda: body(""))
    assert first_difference(first, _captured(lambda: body(""))) is None
    for change, message in (
        (
            "address",
            r"call 1, aten.clone.default called at .*: .*address 0x.* against .*address 0x",
        ),
        ("argument", r"call 2, aten.mul_.Tensor called at .*: 2 against 3"),
        ("memory", r"call 3, .*\[4\] .*of the graph's memory 0 against .*\[2\] .* memory 1"),
        ("shape", r"call 4, aten.add_.Tensor .*\[2\] .* against torch.float32 \[3\]"),
        ("number", r"call 4, aten.add_.Tensor .*: number 2.0 against number 3.0"),
        ("pointer", r"call 5, kernel fssdp_count .*: pointer to byte 0 .* 1 against .* 0"),
        ("launch", r"call 5, kernel fssdp_count called at .*: 0 against 1"),
        ("fewer", r"call 5, .* against : kernel fssdp_count against none"),
    ):
        difference = first_difference(first, _captured(lambda change=change: body(change)))
        assert re.match(message, str(difference)), (change, difference)


@pytest.mark.slow
@ranks(1)
def test_memory_that_changes_after_the_capture_is_named_by_the_replay() -> None:
    graphs_on_cpu.install()
    for change, message in (
        (lambda module: setattr(module, "table", torch.full((4,), 3.0)), "was freed"),
        (lambda module: module.table.resize_(100_000), "moved"),
    ):
        x, module, graph = torch.arange(4.0), torch.nn.Module(), torch.cuda.CUDAGraph()
        module.table = torch.full((4,), 2.0)
        with torch.cuda.graph(graph):
            y = x * module.table
        graph.replay()
        assert y.tolist() == [0.0, 2.0, 4.0, 6.0]
        change(module)
        line = rf"{message}.*aten.mul.Tensor called at .*test_graph_capture.py"
        with pytest.raises(CaptureError, match=line):
            graph.replay()
    # a launch of ours takes an address
    sources = [torch.ones(4)]
    graph = _captured(lambda: _launch("reads", sources[0]))
    sources.clear()
    line = r"was freed.*kernel reads called at .*test_graph_capture.py"
    with pytest.raises(CaptureError, match=line):
        graph.replay()
