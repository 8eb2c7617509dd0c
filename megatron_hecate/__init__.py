"""Fully Sharded Sparse Data Parallelism (FSSDP) for Megatron-LM's Mixture-of-Experts models.

    from megatron_hecate import HecateConfig, fssdp
    model_chunks = fssdp(HecateConfig(slots=2))(model_chunks)     # before DDP wraps them

Importing this package touches neither Megatron nor CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_hecate.config import HecateConfig

__version__ = "0.1.0"
__all__ = ["HecateConfig", "fssdp"]


def fssdp(config: HecateConfig | None = None) -> Callable[[list], list]:
    """The hook ``list[model chunk] -> list[model chunk]``; see `megatron_hecate.layer.fssdp`."""
    from megatron_hecate import layer  # imports Megatron

    return layer.fssdp(config or HecateConfig())
