"""Run Megatron on a CPU, over gloo, for tests and the demo. Never for a GPU run.

Megatron calls ``torch.cuda`` whether or not there is a GPU. `install` puts a stand-in behind every
such call that training makes; the docstring of each stand-in gives its reason. Call `install()`
before the first import of megatron, and `after_import()` after it; `for_training()` replaces the
latter when ``megatron.training`` is used. ``run_on_cpu.py`` does so for unmodified scripts.

Works with megatron-core 0.16.1 to 0.20. Not supported: TransformerEngine, DeepEP, CUDA graphs, any
timing of a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import time
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from plain_adam import load_without_grad, use_plain_adam
from torch.overrides import TorchFunctionMode


def install() -> None:
    """Put the CPU behind ``torch.cuda``.

    Raises:
        RuntimeError: on a machine with a GPU, which would silently train on the CPU.
    """
    if getattr(torch.cuda, "_hecate_stand_in", False):
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "megatron_on_cpu is for machines without a GPU, "
            "and torch.cuda.is_available() is True here"
        )
    torch.cuda._hecate_stand_in = True
    for stand_in in (
        _rng,
        _device,
        _streams,
        _factories,
        _type_names,
        _uneven_all_gather,
        _one_all_gather_each,
        _no_compile,
    ):
        stand_in()


def after_import() -> None:
    """Install the stand-ins inside Megatron's own modules; call it once they are imported."""
    for stand_in in (_te_names, _splits, _keep_sent_tensors, load_without_grad, use_plain_adam):
        stand_in()


def for_training() -> None:
    """Install the stand-ins of `after_import`, and those for ``megatron.training``."""
    after_import()
    for stand_in in (_claim_gpu, _no_build_at_start):
        stand_in()


class _Stream:
    """CUDA stream of the CPU, which runs in program order: all streams are one.

    All instances are equal, so that none counts as a side stream.
    """

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class _Event:
    """CUDA event that takes the time of the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record()

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end.seconds - self.seconds) * 1e3


@contextlib.contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _rng() -> None:
    """Give tensor_parallel.random the CPU generator for its per-region states of the device."""
    cuda = torch.cuda
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.random.set_rng_state = cuda.set_rng_state

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    for module in (cuda, cuda.random):
        module.manual_seed = seed
        module.manual_seed_all = seed
    cuda.default_generators = _OneGenerator()
    # torch would queue the call until CUDA starts, which it never does: the RNG fork would become
    # a silent no-op.
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda._lazy_init = lambda: None
    # Forking the device's generator changes the CPU's, which is the same one here, and Megatron
    # warns each time.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


class _OneGenerator:
    """Sequence of the devices' generators, with the CPU's for every device."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _device() -> None:
    """Make the CPU the current device, on which layers allocate parameters and buffers."""
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda device: None
    cuda.device = _nothing
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.is_initialized = lambda: True


def _streams() -> None:
    """Replace streams and events: dispatcher, shared experts and DDP construct side streams."""
    cuda = torch.cuda
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.stream = _nothing
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.nvtx = types.SimpleNamespace(
        range_push=lambda *args: None, range_pop=lambda: None, range=_nothing
    )
    torch.Tensor.record_stream = lambda self, stream: None


def _is_cuda(device: Any) -> bool:
    """Check for a CUDA device; a plain number is the index of a GPU."""
    return (
        type(device) is int
        or (isinstance(device, str) and device.startswith("cuda"))
        or (isinstance(device, torch.device) and device.type == "cuda")
    )


class _CudaIsCpu(TorchFunctionMode):
    """Mode in which functions of torch that ask for a CUDA device run on the CPU."""

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


def _factories() -> None:
    """Redirect ``device="cuda"``, a literal in optimizer, gradient clipping and schedules."""
    _CudaIsCpu().__enter__()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def _type_names() -> None:
    """Name types as on CUDA: the optimizer compares strings such as "torch.cuda.FloatTensor"."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        if name.startswith("torch.cuda."):
            return name
        return name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = torch.nn.Parameter.type = type_


def _uneven_all_gather() -> None:
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


def _one_all_gather_each() -> None:
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


def _no_compile() -> None:
    """Disable torch.compile, behind Megatron's jit_fuser.

    Its inductor reads device properties from torch.cuda once a device seems to exist.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch._dynamo.config

    torch._dynamo.config.disable = True


def _te_names() -> None:
    """Define a TransformerEngine name that megatron-core 0.16's router uses but does not import."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _splits() -> None:
    """Convert the dispatcher's splits on the CPU.

    It converts only CUDA tensors to the integer lists that all_to_all_single takes.
    """
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    original = moe_utils.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        if torch.is_tensor(tensor) and not tensor.is_cuda:
            if as_numpy:
                return tensor.numpy()
            return tensor
        return original(tensor, as_numpy, record_stream)

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = (
        maybe_move_tensor_to_cpu
    )


def _keep_sent_tensors() -> None:
    """Keep tensors that the pipeline sends.

    The pipeline frees a sent tensor at once, which is right for NCCL; gloo reads it later, and the
    receiver would get garbage.
    """
    import megatron.core.pipeline_parallel.schedules as schedules

    original = schedules.custom_backward
    schedules.deallocate_output_tensor = lambda out, deallocate_pipeline_outputs=False: None

    def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
        if output.numel() == 1:
            return original(output, grad_output)
        return torch.autograd.backward(output, grad_tensors=grad_output)

    schedules.custom_backward = custom_backward


def _claim_gpu() -> None:
    """Pretend a GPU to megatron.training, which refuses to start without one.

    Called after the imports, which probe for a real GPU. The properties are only printed.
    """
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.get_device_name = lambda *args: "cpu"
    properties = types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=8 << 30, multi_processor_count=1
    )
    cuda.get_device_properties = lambda *args: properties
    cuda.set_stream = lambda stream: None
    cuda.memory_stats = lambda *args: {}
    cuda.mem_get_info = lambda *args: (8 << 30, 8 << 30)
    cuda.reset_peak_memory_stats = lambda *args: None
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(cuda, name, lambda *args: 0)
    cuda.device_memory_used = lambda *args: 0


def _no_build_at_start() -> None:
    """Skip the C++ and CUDA helpers that training builds when it starts.

    A wheel has the C++ helpers compiled, but no Makefile; the CUDA helpers need nvcc.
    """
    import megatron.core.datasets.utils as dataset_utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        dataset_utils.compile_helpers = lambda: None
    # The fused kernels are gone from 0.18 on.
    with contextlib.suppress(ImportError):
        import megatron.legacy.fused_kernels as fused_kernels

        fused_kernels.load = lambda args: None
