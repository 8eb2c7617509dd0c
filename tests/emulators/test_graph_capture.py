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
import numpy as np
import pytest
import torch
from graph_calls import first_difference
from graph_capture import Graph, not_in_graphs
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


@ranks(1)
def test_events_of_a_capture_cannot_be_asked_afterwards() -> None:
    graphs_on_cpu.install()
    events: list[Any] = []
    _captured(lambda: events.append(torch.cuda.current_stream().record_event()))
    (event,) = events
    stream = torch.cuda.current_stream()
    for ask in (event.query, event.synchronize, lambda: stream.wait_event(event)):
        with pytest.raises(CaptureError, match="an event that was recorded inside a capture"):
            ask()


def _launch(name: str, source: Any, number: int = 0) -> None:
    from megatron_hecate.device.launch import Kernels

    kernels = SimpleNamespace(on_gpu=False, function=lambda name: lambda *_: None)
    arguments = ctypes.c_void_p(source.data_ptr()), ctypes.c_uint(number)
    Kernels.launch(kernels, name, *arguments, blocks=1, threads=1)


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
