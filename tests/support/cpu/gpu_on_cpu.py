"""One GPU per rank that is none: the CUDA branch of our code runs as a whole, on CPU ranks.

| what our code uses | what stands in |
|---|---|
| CUDA's driver | ``fake_libcuda.c``, which checks each call and runs host kernels |
| ``torch.cuda``: streams, events | `streams_on_cpu` |
| tensors of a GPU | CPU tensors that say they lie on ``cuda:0`` |
| symmetric memory | POSIX shared memory |

How a test uses it, on a rank::

    driver = gpu_on_cpu.install()  # before our kernels are loaded
    ...
    assert not driver.faults, driver.log

Work runs at once and in program order: whether streams wait for each other as they must is for `stream_order`. A kernel
runs on two blocks of one thread. Memory of the host and of the GPU cannot be told apart.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_on_cpu
import streams_on_cpu
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.device import driver
from megatron_hecate.device.compile import host_library

GPU = torch.device("cuda", 0)
OFFSET = 1024  # of a tensor in its allocation of symmetric memory
PREFIX = "megatron-hecate-test-"


class Driver:
    """The driver, as a test sees it.

    Args:
        version: of CUDA; newer functions are missing.
        multiprocessors: of the GPU.
    """

    def __init__(self, *, version: int = 13000, multiprocessors: int = 132) -> None:
        folder = Path(os.environ.get("TEST_FOLDER") or tempfile.mkdtemp())
        built = folder / f"rank-{os.environ.get('RANK', 0)}" / "libcuda.so.1"
        built.parent.mkdir(exist_ok=True)
        source = Path(__file__).with_name("fake_libcuda.c")
        options = "-O1 -Wall -Wextra -Werror -shared -fPIC -Wl,-soname,libcuda.so.1".split()
        # -I, of a header of CUDA 13 that its wheel or triton's brings along
        command = ["gcc", *options, f"-I{_headers()}", "-o", str(built), str(source), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        # whoever asks for a library of that name gets the one that is loaded
        self._library = ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_set(version, multiprocessors, str(host_library()).encode())
        self.multiprocessors = multiprocessors

    @property
    def log(self) -> list[str]:
        """A line for every call so far, faults among them."""
        return self._library.fake_log().decode().splitlines()

    @property
    def faults(self) -> list[str]:
        """What a driver would refuse, or a GPU hang on."""
        return [line.removeprefix("FAULT ") for line in self.log if line.startswith("FAULT ")]

    @property
    def launched(self) -> list[str]:
        """The names of the kernels."""
        return [line.split()[1] for line in self.log if line.startswith("launch ")]

    @property
    def has_failed(self) -> bool:
        """Whether a kernel gave up, which ended the context."""
        return bool(self._library.fake_has_failed())

    def clear(self) -> None:
        """Forget calls and faults."""
        self._library.fake_clear()

    def refuse_cubins(self) -> None:
        """Load none from now on, as a driver does with those of a newer major version of CUDA."""
        self._library.fake_refuse_cubins()


def install(*, version: int = 13000, multiprocessors: int = 132) -> Driver:
    """Put it all in place, in this process for good."""
    made = Driver(version=version, multiprocessors=multiprocessors)
    megatron_on_cpu.install()
    streams_on_cpu.install()
    _launches(made)
    _torch_cuda(made)
    _tensors()
    _symmetric_memory()
    return made


def _headers() -> Path:
    import nvidia

    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/include/cuda.h")]
    assert found, "no cuda.h beside torch: its build for CUDA 13 brings one along"
    return found[0].parent


def _launches(made: Driver) -> None:
    launch = driver.launch

    @functools.wraps(launch)
    def checked(kernel: int, arguments: Sequence[Any], **sizes: Any) -> None:
        """Note the number and sizes of the arguments: a driver takes addresses alone."""
        count = len(arguments)
        made._library.fake_given(count, (ctypes.c_uint * count)(*map(ctypes.sizeof, arguments)))
        launch(kernel, arguments, **sizes)

    driver.launch = checked


def _torch_cuda(made: Driver) -> None:
    cuda = torch.cuda

    def synchronize(*_: Any) -> None:
        streams_on_cpu.DEFAULT.synchronize()
        if made.has_failed:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    properties = SimpleNamespace(name="a GPU on a CPU", major=9, minor=0, uuid="none")
    properties.total_memory, properties.multi_processor_count = 8 << 30, made.multiprocessors
    properties.shared_memory_per_block_optin = 227 << 10
    cuda.init, cuda.synchronize = (lambda: None), synchronize
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: properties
    cuda.current_device, cuda.device_count = (lambda: 0), (lambda: 1)
    cuda.is_current_stream_capturing = lambda: False
    cuda.mem_get_info = lambda *_: (8 << 30, 8 << 30)


class _Generator(torch.Generator):
    """One of the CPU, whatever device it is asked for."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)

    def __init__(self, device: Any = None) -> None:
        super().__init__()


def _tensors() -> None:
    """Every tensor is on the GPU, to whoever asks in Python."""
    torch.Generator = _Generator
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.Tensor.device = property(lambda tensor: GPU)
    backward = torch.autograd._engine_run_backward

    def with_mode(*args: Any, **kwargs: Any) -> Any:
        """A mode takes itself out of what it calls, which a whole backward is."""
        with megatron_on_cpu._CudaIsCpu():
            return backward(*args, **kwargs)

    torch.autograd._engine_run_backward = with_mode


def _symmetric_memory() -> None:
    import torch.distributed._symmetric_memory as symmetric

    files: dict[int, str] = {}

    def memory(name: str) -> Tensor:
        with Path(name).open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def empty(size: int, *, dtype: torch.dtype, device: Any) -> Tensor:
        assert dtype is torch.uint8 and torch.device(device).type == "cuda"
        with tempfile.NamedTemporaryFile(prefix=PREFIX, dir="/dev/shm", delete=False) as file:
            file.truncate(OFFSET + size)
        block = memory(file.name)[OFFSET:]
        block.random_(256)  # as memory is that was used before
        files[block.data_ptr()] = file.name
        return block

    def rendezvous(own: Tensor, group: Any) -> Any:
        name, rank = files.pop(own.data_ptr()), dist.get_rank(group)
        names: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, name, group=group)
        blocks = [own if other == name else memory(other) for other in names]
        pointers = [block.data_ptr() for block in blocks]
        pointers[rank] -= OFFSET
        dist.barrier(group)
        Path(name).unlink()
        view = SimpleNamespace(rank=rank, world_size=len(names), multicast_ptr=0)
        view.buffer_ptrs, view.keeps = pointers, blocks
        return view

    symmetric.empty, symmetric.rendezvous = empty, rendezvous
    symmetric.get_backend = lambda device: "CUDA"
