"""Fully Sharded Sparse Data Parallelism (FSSDP) for Megatron-LM's Mixture-of-Experts models.

    from megatron_hecate import HecateConfig, fssdp
    model_chunks = fssdp(HecateConfig(slots=2))(model_chunks)     # before DDP wraps them

Importing this package imports neither Megatron nor CUDA.

| package | content |
|---|---|
| `config`, `enable`, `bridge`, `__main__` | settings; imports that switch FSSDP on; commands |
| `step` | a step: the MoE layer, one forward on one screen; iterations, forecasts, prefetching |
| `replicas` | replicas on this rank: buffers, lifetimes, autograd |
| `routing`, `device` | kernels that reroute tokens; compilation and launch of kernels |
| `plan` | placement of replicas: numpy in, frozen plans out |
| `comm` | transfers: plans, the transport `p2p`; groups and agreement of ranks |
| `megatron` | adapters to Megatron's modules: experts, dispatchers, gradient buckets |
| `switch_on` | whether FSSDP can be switched on; the hook that converts a model |
| `faults` | ranks that stall or die, and restarts in the process |

Boxes, which import the packages above, and which those know by a protocol only:

| box | content |
|---|---|
| `nvlink` | the transport `nvlink` |
| `homes` | experts that change homes, with their optimizer state |
| `routes` | routes that are known before the forward |
| `graphs` | iterations that one CUDA graph holds |
| `record` | records, metrics; `observe`, which counts loads without FSSDP |

`tools` are commands that need no job; nothing in training imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

from megatron_hecate.config import HecateConfig

if TYPE_CHECKING:
    from megatron_hecate.record.metrics import layer_metrics

__version__ = "0.1.0"
__all__ = [
    "HecateConfig",
    "fssdp",
    "iteration_begins",
    "layer_metrics",
    "release",
    "restore_homes",
    "weights_changed",
]


def __getattr__(name: str) -> Any:
    """Import ``layer_metrics``, a name of a box, on first use."""
    if name != "layer_metrics":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_hecate.record.metrics import layer_metrics

    return layer_metrics


def fssdp(config: HecateConfig | None = None) -> Callable[[Any], Any]:
    """Return the hook that converts a model, or a list of model chunks, to FSSDP and returns it.

    Call the hook on all ranks, after the model is built and before DDP wraps it. Collective:

        model_chunks = fssdp(HecateConfig(slots=2))(model_chunks)

    The hook converts every ``MoELayer`` in place; a second call changes nothing. It is also a
    pre-wrap hook for a provider of Megatron-Bridge and for the model config of
    ``megatron.training``. If FSSDP cannot be switched on, it raises on every rank, lists the
    problems of all ranks, and leaves the model unchanged: ``ValueError`` for settings that cannot
    be combined, differ between ranks, or do not fit the model; ``TypeError`` for anything that is
    no model; ``TimeoutError`` if a rank does not call the hook within ``config.timeout`` seconds.

    Args:
        config: settings of FSSDP, see ``help(HecateConfig)``; ``None`` for the defaults.

    Returns:
        The hook: a function of a list of model chunks, or of one model, that returns its argument.

    Raises:
        TypeError: for a ``config`` of another type, such as the model itself.
    """
    if config is None:
        config = HecateConfig()
    # such as the model itself, which would make a hook that nobody calls
    if not isinstance(config, HecateConfig):
        raise TypeError(
            f"fssdp takes a HecateConfig, or nothing, got a value of type {type(config).__name__}; "
            "write fssdp(HecateConfig(slots=2))(model_chunks)"
        )
    # the import loads Megatron, which importing this package must not
    from megatron_hecate.switch_on.convert import Hook

    return Hook(config)


def restore_homes(model: Any) -> None:
    """Move all experts back to their original ranks until the next iteration. Collective.

    Undoes rehoming. Call it on all ranks before code that FSSDP does not know reads or writes
    weights; saving and loading checkpoints, and Bridge's conversions, call it themselves. It does
    nothing if no expert has moved.

    Args:
        model: a model chunk or a list of model chunks, wrapped by DDP or not.
    """
    prefetcher = _prefetcher(model)
    if prefetcher is not None and prefetcher.rehoming is not None:
        prefetcher.rehoming.restore()


def release(model: Any) -> int:
    """Free the memory of replicas until the next training forward, which allocates it again.

    Call it on all ranks between two steps, such as before a rollout. Then
    ``torch.cuda.empty_cache()`` gives the memory to other processes. NCCL's connections stay.

    Args:
        model: a model chunk or a list of model chunks, wrapped by DDP or not.

    Returns:
        Bytes that this rank has freed.
    """
    prefetcher = _prefetcher(model)
    return 0 if prefetcher is None else prefetcher.release_memory()


def iteration_begins(model: Any) -> None:
    """Say that the next training forward begins an iteration.

    Loops that use Megatron's DDP, optimizers and schedules need not call it: FSSDP infers where
    iterations begin. With neither DDP nor an optimizer of torch it cannot. In a loop without
    Megatron's schedules weights may change between any two forwards, so that each forward fetches
    replicas again; from the first call of this function on, they are fetched once per iteration,
    and after `weights_changed`. Call it on all ranks.

    Args:
        model: a model chunk or a list of model chunks, wrapped by DDP or not.
    """
    if (prefetcher := _prefetcher(model)) is not None:
        prefetcher.clock.is_told = True
        prefetcher.clock.end_iteration("the loop began another iteration")


def weights_changed(model: Any) -> None:
    """Say that weights of experts have been written: the next forward fetches replicas again.

    Needed only for writes within an iteration that leave no trace, such as by ``param.data`` in
    ``forward_step``. Call it on all ranks at the same point.

    Args:
        model: a model chunk or a list of model chunks, wrapped by DDP or not.
    """
    if (prefetcher := _prefetcher(model)) is not None:
        prefetcher.clock.weights_changed()


def _prefetcher(model: Any) -> Any:
    """Return the prefetcher that all converted layers of a model share; ``None`` without such."""
    chunks = model if isinstance(model, list | tuple) else [model]
    modules = chain.from_iterable(chunk.modules() for chunk in chunks)
    return next((module.prefetcher for module in modules if hasattr(module, "fssdp")), None)
