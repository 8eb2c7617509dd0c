"""Spans of planning, transfers, waits and routing, for ``torch.profiler``.

Under the profiler (or ``emit_nvtx``, which Megatron's ``--profile`` starts) every span is a
``record_function`` with a stable name, ``fssdp/<what> <layer>``; on CUDA the transfers themselves
appear as kernels on a stream of their own.

| span | content |
|---|---|
| ``plan`` | choice of replicas for an iteration |
| ``spAG start``, ``spRS start`` | posting of a transfer |
| ``spAG wait``, ``spRS wait`` | the part of a transfer that was not hidden |
| ``loads``, ``quotas``, ``late`` | routing: exchange of loads, quotas, late replicas |
| ``homes move`` | experts that change homes, with their optimizer state |

Without a profiler a span costs a comparison. All times are host times: on GPUs they show when work
was posted and waited for, not when it ran.
"""

from __future__ import annotations

import contextlib

from torch.autograd import profiler

PREFIX = "fssdp/"
# One object for all spans that are not recorded, so that a span allocates nothing.
_NOTHING = contextlib.nullcontext()


def span(what: str, layer: str) -> contextlib.AbstractContextManager[object]:
    """Record the block as ``what`` of ``layer``, a span of the table above."""
    # The flag of the whole process: under a profiler of all threads
    # `torch.autograd._profiler_enabled` returns False.
    is_on = profiler._is_profiler_enabled
    return profiler.record_function(f"{PREFIX}{what} {layer}") if is_on else _NOTHING
