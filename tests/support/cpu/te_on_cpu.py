"""TransformerEngine's own Python on a CPU: the unmodified wheel, with only its compiled half replaced (`tex_on_cpu`).

``.ci/env.sh`` puts the wheels into the environment, in folders that are on nobody's path; `install` puts one there.
It must run before Megatron is imported: tests start with it (``@ranks(n, preload="te")``), or call it first, with
``preload=None``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron_on_cpu
import tex_on_cpu
import torch

NEWEST, OLDEST = "2.20.2", "2.9.0"
# Compute capability that the GPU pretends to have, by what ranks start with (`ranks.ranks`): of Hopper and Blackwell.
CAPABILITY = {"te": (9, 0), "te-blackwell": (10, 0)}
_installed: list[tuple[str, str]] = []


def install(version: str = NEWEST, *, packages: str = "te") -> None:
    """Make ``transformer_engine`` of ``version`` importable, and import it; again is no error.

    Args:
        packages: a key of `CAPABILITY`.

    Raises:
        FileNotFoundError: when the environment has no such wheel.
        RuntimeError: when Megatron was imported already: it has decided that there is no TransformerEngine.
    """
    if _installed == [(version, packages)]:
        return
    folder = Path(sys.prefix) / "transformer_engine" / version
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not there: .ci/env.sh makes it")
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core is imported already: call te_on_cpu.install() first, @ranks(preload=None)"
        )
    megatron_on_cpu.install()
    _gpu(CAPABILITY[packages])
    sys.path.insert(0, str(folder))
    sys.modules["transformer_engine_torch"] = tex_on_cpu.Tex("transformer_engine_torch")
    export = "transformer_engine.pytorch.onnx_extensions"  # what needs onnx, which no training does
    sys.modules[export] = tex_on_cpu.Tex(export)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TE then loads no libraries of CUDA
    with warnings.catch_warnings():
        # without the compiled half
        warnings.filterwarnings("ignore", message="Detected a PyTorch installation")
        import transformer_engine.common as common

        common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch

    assert Path(transformer_engine.__file__).is_relative_to(folder), transformer_engine.__file__
    _take_cpu_tensors()
    _installed.append((version, packages))


def _gpu(capability: tuple[int, int]) -> None:
    """TE asks for a GPU's properties while it is imported."""
    properties = types.SimpleNamespace(multi_processor_count=132, total_memory=1 << 37, name="cpu")
    properties.major, properties.minor = capability
    cuda = torch.cuda
    cuda.get_device_capability = lambda *_: capability
    cuda.get_device_properties = lambda *_: properties
    cuda.is_current_stream_capturing = lambda: False
    torch.empty, torch.zeros = _on_cpu(torch.empty), _on_cpu(torch.zeros)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = (lambda *_: None), (lambda: None)


def _on_cpu(factory: Callable) -> Callable:
    """device="cuda" is a literal in TE's backwards, where torch asks no mode of `megatron_on_cpu`."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def _take_cpu_tensors() -> None:
    """TE's modules refuse to be made without a GPU, and inputs that are not on one at the start of a forward."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    base = TransformerEngineBaseModule
    init, prepare = base.__init__, base.prepare_forward

    def init_on_cpu(module: Any, *args: Any, **kwargs: Any) -> None:
        with unittest.mock.patch.object(torch.cuda, "is_available", lambda: True):
            init(module, *args, **kwargs)

    def prepare_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        with _seems_cuda():
            prepared = prepare(module, *args, **kwargs)
        # older TransformerEngines prepare in a context manager, whose check runs when it is entered
        is_context = hasattr(prepared, "__enter__") and not isinstance(prepared, torch.Tensor)
        return _entered_as_cuda(prepared) if is_context else prepared

    base.__init__, base.prepare_forward = init_on_cpu, prepare_forward


@contextlib.contextmanager
def _seems_cuda() -> Iterator[None]:
    """Tensors say that they are on a GPU."""
    torch.Tensor.is_cuda = property(lambda tensor: True)
    try:
        yield
    finally:
        del torch.Tensor.is_cuda


@contextlib.contextmanager
def _entered_as_cuda(prepared: Any) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        with _seems_cuda():
            value = stack.enter_context(prepared)
        yield value
