"""What FSSDP adds between the gate and the dispatch, and in their backward: launches, collectives, and waits of the host.

Oracle: the operations that torch's dispatcher sees, and launches of our own, while our code runs and Megatron's, inside
it, does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny_gpt
from ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hecate.device.launch import Kernels
from megatron_hecate.routing.quotas import QuotaTables
from megatron_hecate.routing.reroute import _Reroute

MOST = 5
MICROBATCHES, LAYERS = 4, 2
ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "detach")  # launch nothing
WAITS = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
)


class Counted:
    """Operations and launches while ours is the innermost function that was wrapped."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.ours, self.counts = patch, False, Counter()

    def wrap(self, owner: Any, names: str, *, ours: bool) -> None:
        for name in names.split():
            self._wrap(owner, name, ours)

    def _wrap(self, owner: Any, name: str, ours: bool) -> None:
        function, static = getattr(owner, name), isinstance(vars(owner)[name], staticmethod)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, self.ours = self.ours, ours
            try:
                return function(*args, **kwargs)
            finally:
                self.ours = before

        self.patch.setattr(owner, name, staticmethod(wrapped) if static else wrapped)

    def watch_kernels(self) -> None:
        """Count the launches of our kernels."""
        launch = Kernels.launch

        def launch_counted(kernels: Any, name: str, *args: Any, **kwargs: Any) -> None:
            self.add(name)
            launch(kernels, name, *args, **kwargs)

        self.patch.setattr(Kernels, "launch", launch_counted)

    def add(self, name: str) -> None:
        if self.ours:
            self.counts[name] += 1


def watching(add: Callable[[str], None]) -> Any:
    """Return a context that calls ``add`` with the name of every operation that computes."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            name, returns = func.__name__.split(".")[0], func._schema.returns
            is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
            if not is_view and name not in ALLOCATES:
                add(name)
            return func(*args, **(kwargs or {}))

    return Mode()


@ranks(2)
def test_at_most_five_launches_and_no_wait() -> None:
    """Per layer and microbatch with replicas. What happens once per iteration (the tables of a placement, the sum of
    the loads) does not count, nor does fetching."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_hecate.step.layer import FSSDPLayer
    from megatron_hecate.step.load_monitor import LoadMonitor
    from megatron_hecate.step.prefetch import Prefetcher

    case = tiny_gpt.initialized(accumulate=MICROBATCHES)
    trained = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook())
    assert trained.replicas > 0 and len(tiny_gpt.moe_layers(trained.chunks)) == LAYERS

    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        counted.wrap(FSSDPLayer, "route preprocess dispatch", ours=True)
        counted.wrap(_Reroute, "backward", ours=True)
        counted.wrap(MoELayer, "route preprocess dispatch", ours=False)
        counted.wrap(Prefetcher, "materialize", ours=False)
        counted.wrap(QuotaTables, "place", ours=False)
        counted.wrap(LoadMonitor, "start_reduce", ours=False)
        counted.watch_kernels()

        with watching(counted.add):
            trained.step(3)

    forwards = MICROBATCHES * LAYERS
    per_forward = {
        name: count // forwards for name, count in counted.counts.items() if count >= forwards
    }
    others = {name: count % forwards for name, count in counted.counts.items() if count % forwards}
    for kernel in ("fssdp_count", "fssdp_quotas", "fssdp_reroute_32", "fssdp_reroute_gradient_32"):
        assert per_forward.pop(kernel) == 1
    assert 4 + sum(per_forward.values()) <= MOST, per_forward
    assert sum(others.values()) <= 3, f"once per iteration: {others}"
    assert not set(WAITS) & set(counted.counts), counted.counts
