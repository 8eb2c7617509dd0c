"""What FSSDP adds between the gate and the dispatch, and in their backward: launches, collectives, and waits of the host;
and calls of Python beyond stock Megatron.

Oracle: the operations that torch's dispatcher sees, and launches of our own, while our code runs and Megatron's, inside
it, does not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny_gpt
import torch.distributed as dist
from ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hecate import HecateConfig, fssdp
from megatron_hecate.device.launch import Kernels
from megatron_hecate.routing.quotas import QuotaTables
from megatron_hecate.routing.reroute import _Reroute

MOST = {"p2p": 5, "nvlink": 4}
MICROBATCHES, LAYERS = 4, 2
ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "detach")  # launch nothing
WAITS = "_local_scalar_dense item nonzero equal is_nonzero masked_select _unique2".split()


class Counted(TorchDispatchMode):
    """Operations that compute, and launches, while ours is the innermost function that was wrapped.

    Other threads do not count: without a GPU, a transfer in flight launches its kernels in a thread of its own.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.patch, self.ours, self.counts = patch, False, Counter()
        self.thread = threading.get_ident()

    def wrap(self, owner: Any, names: str, *, ours: bool) -> None:
        for name in names.split():
            wrapped = self._wrapped(getattr(owner, name), ours)
            is_static = isinstance(vars(owner)[name], staticmethod)
            self.patch.setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)

    def _wrapped(self, function: Callable, ours: bool) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, self.ours = self.ours, ours
            try:
                return function(*args, **kwargs)
            finally:
                self.ours = before

        return wrapped

    def add(self, name: str) -> None:
        self.counts[name] += self.ours and threading.get_ident() == self.thread

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name, returns = func.__name__.split(".")[0], func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and name not in ALLOCATES:
            self.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("transport", MOST)
@ranks(2)
def test_few_launches_and_no_wait(transport: str) -> None:
    """Per layer and microbatch with replicas, an all-gather among them or not. What happens once per iteration (the
    tables of a placement, the sum of the loads) does not count, nor does fetching."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_hecate.step.layer import FSSDPLayer
    from megatron_hecate.step.load_monitor import LoadMonitor
    from megatron_hecate.step.prefetch import Prefetcher

    case = tiny_gpt.initialized(accumulate=MICROBATCHES)
    trained = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(transport=transport))
    assert trained.replicas > 0 and len(tiny_gpt.moe_layers(trained.chunks)) == LAYERS

    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        counted.wrap(FSSDPLayer, "route preprocess dispatch", ours=True)
        counted.wrap(_Reroute, "backward", ours=True)
        counted.wrap(MoELayer, "route preprocess dispatch", ours=False)
        counted.wrap(Prefetcher, "materialize", ours=False)
        counted.wrap(QuotaTables, "place", ours=False)
        counted.wrap(LoadMonitor, "start_reduce", ours=False)
        launch = Kernels.launch

        def launch_counted(kernels: Kernels, name: str, *args: Any, **settings: Any) -> None:
            counted.add(name)
            launch(kernels, name, *args, **settings)

        patch.setattr(Kernels, "launch", launch_counted)
        with counted:
            trained.step(3)

    forwards = MICROBATCHES * LAYERS
    counts = +counted.counts
    per_forward = {name: n // forwards for name, n in counts.items() if n >= forwards}
    others = {name: n % forwards for name, n in counts.items() if n % forwards}
    for kernel in ("fssdp_count", "fssdp_quotas", "fssdp_reroute_32", "fssdp_reroute_gradient_32"):
        assert per_forward.pop(kernel) == 1
    assert 4 + sum(per_forward.values()) <= MOST[transport], per_forward
    assert sum(others.values()) <= 3, f"once per iteration: {others}"
    assert not set(WAITS) & set(counts), counts


# expert modules: calls that FSSDP may add per layer and microbatch without replicas; and with them on rank 0, whose
# experts the replicas are of, and on rank 1, whose two slots they fill
MOST_CALLS = {"TEGroupedMLP": (166, (340, 590)), "SequentialMLP": (170, (365, 800))}


@pytest.mark.newest
@pytest.mark.parametrize("experts", MOST_CALLS)
@ranks(2, preload="te")
def test_few_calls_are_added(experts: str) -> None:
    """Calls of Python and of C functions that a layer adds to the main thread, forward and backward.

    Oracle: the interpreter's own events (``sys.setprofile``). Bounds are a little above what was counted when they were
    set: who adds calls to every microbatch finds out here, who saves some lowers them. `bench/host.py` has times.
    """
    from host_calls import Phases, use_plain_factories

    use_plain_factories()
    tiny_gpt.install_fused_wgrad()
    grouped = experts == "TEGroupedMLP"
    settings = dict(hidden_size=16, moe_ffn_hidden_size=16, gradient_accumulation_fusion=grouped)
    case = tiny_gpt.initialized(
        experts=16, accumulate=MICROBATCHES, skew=2.0, grouped=grouped, settings=settings
    )
    phases = Phases()
    hooks: tuple[Any, ...] = (None, fssdp(HecateConfig(slots=2)), tiny_gpt.fssdp_hook())
    calls, replicas = [], []
    for hook in hooks:
        trained = tiny_gpt.train(case, steps=3, hook=hook)
        dist.barrier()
        phases.clear()
        phases.counts = True
        trained.step(3)
        phases.counts = False
        calls.append(phases.calls.total() / LAYERS / MICROBATCHES)
        replicas.append(trained.replicas)
    assert replicas[:2] == [0, 0] and replicas[2] >= LAYERS
    stock, *ours = calls
    added = [count - stock for count in ours]
    assert stock > 1000 and added[0] > 0, (stock, added)
    without, with_replicas = MOST_CALLS[experts]
    for count, most in zip(added, (without, with_replicas[dist.get_rank()]), strict=True):
        assert count <= most, (
            f"{added} calls are added to {stock:.0f}, {MOST_CALLS[experts]} may be"
        )
    dist.barrier()
