"""slime's actor for Megatron on a CPU, for tests that name a checkout in $HECATE_SLIME.

Written for THUDM/slime at commit 624b824a (August 2026). Ray and torch_memory_saver are imported and do nothing;
SGLang, which needs a GPU, is not there.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

import te_on_cpu
import torch
import torch.distributed as dist


def install() -> None:
    """Put slime on the path, and the CPU where it expects a GPU. Ranks start with ``preload=None``."""
    te_on_cpu.install()
    import megatron_on_cpu
    import te_layers_on_cpu

    megatron_on_cpu.for_training()
    te_layers_on_cpu.install()
    sys.path.insert(0, os.environ["HECATE_SLIME"])
    _fill_in_for_sglang()
    _register_cpu()
    import numpy
    import ray
    import reloadable_groups
    from slime.backends.megatron_utils import initialize
    from slime.utils.reloadable_process_group import ReloadableProcessGroup
    from torch_memory_saver import torch_memory_saver

    # slime refuses NumPy 2, which this Megatron supports
    initialize.np = types.SimpleNamespace(__version__="1.26", random=numpy.random)
    # names that torch 2.13 has given collectives, and that slime's groups do not forward
    for name in reloadable_groups.FORWARDED:
        if name not in vars(ReloadableProcessGroup):
            forward = functools.partialmethod(ReloadableProcessGroup._fwd, name)
            setattr(ReloadableProcessGroup, name, forward)
    # they unmap and map memory of a GPU
    for name in ("pause", "resume"):
        setattr(torch_memory_saver, name, lambda *_, **__: None)
    # an object of the store is itself here, and each actor has GPU 0
    ray.get, ray.get_gpu_ids = (lambda reference: reference), (lambda: [0])


def meet_in_store() -> None:
    """Have slime make the default process group, over the store in which the ranks have met."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    initialize = dist.init_process_group

    def meet(backend: str, timeout: Any, **settings: Any) -> None:
        settings = {"store": dist.PrefixStore("slime", store), **settings}
        initialize(backend, timeout=timeout, **{"rank": rank, "world_size": size, **settings})

    dist.init_process_group = meet


def _fill_in_for_sglang() -> None:
    """Fill in for modules that slime imports on a rank that trains, whose functions it does not call there."""

    class Absent(types.ModuleType):
        __path__: list = []

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)

            def fail(*_: Any, **__: Any) -> Any:
                raise AssertionError(f"{self.__name__}.{name} of SGLang is called")

            return fail

    class Finder:
        def find_spec(self, name: str, *_: Any) -> Any:
            if name.partition(".")[0] not in ("sglang", "sglang_router"):
                return None
            return importlib.machinery.ModuleSpec(name, self)

        def create_module(self, spec: Any) -> Absent:
            return Absent(spec.name)

        def exec_module(self, module: Absent) -> None: ...

    sys.meta_path.append(Finder())
    patches = importlib.import_module("sglang.srt.utils.patch_torch")
    # called before an export: it lets another process open tensors of this one's GPU
    patches.monkey_patch_torch_reductions = lambda: None


def _register_cpu() -> None:
    """Register a CPU as accelerator, by slime's own function."""
    from slime.utils import accelerator
    from slime.utils.accelerator.torch_accelerator import TorchAccelerator

    class Cpu(TorchAccelerator):
        name = device_type = "cpu"
        # slime does not destroy groups of the backend "gloo"
        communication_backend_name = "cpu:gloo"

        def _module(self) -> Any:
            return torch.cuda

        def is_available(self) -> bool:
            return True

        device_name = current_device = lambda self, index=None: "cpu"
        mem_get_info = lambda self, device=None: (1 << 36, 1 << 36)  # noqa: E731
        memory_allocated = memory_reserved = lambda self, device=None: 0

    os.environ["SLIME_ACCELERATOR"] = "cpu"
    accelerator.register_accelerator("cpu", Cpu, communication_backends=("cpu:gloo",))
