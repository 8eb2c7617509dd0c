"""Release of the replicas' memory between two training steps."""

from __future__ import annotations

from megatron_hecate.step.prefetch import Prefetcher


def release_memory(prefetcher: Prefetcher) -> int:
    """Free all buffers of a model on this rank; its next iteration allocates them again.

    Returns:
        Bytes freed; 0 if none were allocated.

    Raises:
        RuntimeError: while gradients of replicas wait to return to their homes.
    """
    waiting = sorted(r.label for r in prefetcher.returns.live if r.is_accumulating)
    if waiting:
        raise RuntimeError(
            f"FSSDP: megatron_hecate.release(model) while gradients of replicas wait "
            f"({', '.join(waiting)}); call it after the optimizer's step, or after "
            "finish_grad_sync() or zero_grad_buffer() of every model chunk"
        )
    pool = prefetcher.buffers.allocated
    if pool is None or not pool.nbytes:
        return 0
    prefetcher.clock.end_iteration("memory was released")
    # waits for transfers that use the memory
    pool.reset("memory was released")
    freed = pool.nbytes
    pool.release()
    return freed
