"""Model chunks that reach the hook: completed if they come one at a time, and marked after it."""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any

from megatron.core import parallel_state
from torch.nn import Module
from torch.utils.hooks import RemovableHandle


@dataclasses.dataclass
class PendingChunks:
    """Chunks of one rank that wait for the rank's other chunks.

    A framework may call the hook after each chunk of a virtual pipeline, as mbridge does. Layers of
    all chunks are converted together, because they share buffers and iterations.
    """

    _waiting: list[tuple[Module, RemovableHandle]] = dataclasses.field(default_factory=list)

    def complete(self, chunks: list[Module]) -> list[Module] | None:
        """Return all chunks of this rank once the last one is given, and ``None`` before.

        Args:
            chunks: chunks given to the hook; more than one are complete.
        """
        if len(chunks) != 1:
            return chunks
        (chunk,) = chunks
        expected = num_chunks(getattr(chunk, "config", None))
        if expected == 1:
            return chunks
        if all(chunk is not waiting for waiting, _ in self._waiting):
            handle = chunk.register_forward_pre_hook(self._refuse)
            self._waiting.append((chunk, handle))
        if len(self._waiting) < expected:
            return None
        complete = [waiting for waiting, _ in self._waiting]
        for _, handle in self._waiting:
            handle.remove()
        self._waiting.clear()
        return complete

    def _refuse(self, chunk: Module, *_: Any) -> None:
        raise RuntimeError(
            "FSSDP: a model chunk runs, but the hook got only "
            f"{len(self._waiting)} of {num_chunks(getattr(chunk, 'config', None))} chunks of this "
            "rank, one at a time; give it all chunks as one list, "
            "megatron_hecate.fssdp(HecateConfig(...))(model_chunks), before DDP"
        )


def num_chunks(config: Any) -> int:
    """Return the number of model chunks per rank: stages of a virtual pipeline, else 1."""
    if not parallel_state.model_parallel_is_initialized():
        return 1
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return 1
    stages = getattr(config, "virtual_pipeline_model_parallel_size", None)
    return stages or parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1


def mark(chunks: list[Module], *, observing: bool) -> None:
    """Mark model chunks that the hook has run on.

    The chunks are marked, because a pipeline stage may have no MoE layers to show it.
    """
    for chunk in chunks:
        chunk._fssdp_hook = observing


def marks(chunks: list[Module]) -> set[bool]:
    """Return the values of ``observing`` with which the hook has run on the model chunks."""
    modules = chain.from_iterable(chunk.modules() for chunk in chunks)
    return {module._fssdp_hook for module in modules if hasattr(module, "_fssdp_hook")}
