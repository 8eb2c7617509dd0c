"""Fully Sharded Sparse Data Parallelism (FSSDP) for Megatron-LM's Mixture-of-Experts models.

    from megatron_hecate import HecateConfig, fssdp
    model_chunks = fssdp(HecateConfig(slots=2))(model_chunks)     # before DDP wraps them

Importing this package touches neither Megatron nor CUDA.

| package | in an iteration |
|---|---|
| `convert`, `layer` | the hook that switches FSSDP on; the layer, one iteration on one screen |
| `observe` | stock training, loads counted and recorded |
| `runtime` | when things happen: iterations, load history and forecast, planning and fetching ahead |
| `plan` | which rank holds what, and which token goes where: pure, numpy in, frozen plans out |
| `replicas` | the copies on this rank: buffers, lifetimes, autograd |
| `comm` | how they travel: transfer plans, the transports `p2p` and `nvlink` |
| `adapter` | what touches Megatron: assumptions, dispatcher and rerouting, experts |
| `tools` | metrics, records of runs, traces, measured speeds |
| `config`, `enable`, `__main__` | settings and flags; the line for a script; the launcher |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hecate.config import HecateConfig

__version__ = "0.1.0"
__all__ = ["HecateConfig", "fssdp", "restore_homes"]


def fssdp(config: HecateConfig | None = None) -> Callable[[Any], Any]:
    """The hook that takes a list of model chunks, or a model, and returns it; see `megatron_hecate.convert.fssdp`.

    Raises:
        TypeError: for a ``config`` that is none.
    """
    config = HecateConfig.check(config)
    from megatron_hecate import convert  # imports Megatron

    return convert.fssdp(config)


def restore_homes(model: Any) -> None:
    """Have the experts of a model (a chunk, or a list of chunks, wrapped or not) where Megatron built them, until the
    next iteration begins. All ranks call it before they read or write weights in ways that FSSDP does not know; saving
    and loading checkpoints, and Bridge's conversions, call it themselves. It does nothing where no home has moved."""
    for module in (
        module
        for chunk in (model if isinstance(model, list) else [model])
        for module in chunk.modules()
    ):
        if hasattr(module, "fssdp"):
            if module.prefetcher.rehoming is not None:
                module.prefetcher.rehoming.restore()
            return
