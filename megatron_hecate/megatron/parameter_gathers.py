"""One order of gathering experts' parameters on all ranks, independent of each EP group's plans.

With ``overlap_param_gather`` Megatron's DDP gathers parameters bucket by bucket while the forward
runs: a forward pre-hook of the module that owns a parameter waits for its bucket and dispatches the
next one. Dense parameters and experts have a chain of buckets and a process group each, and both
groups contain ranks of several expert-parallel (EP) groups. A fetch reads the homes, so it needs
the experts' gather before stock Megatron would wait for it. EP groups plan independently. If only
the EP groups with replicas waited before the attention, there would be a deadlock: their ranks
would wait for ranks without replicas, which wait for a dense bucket that the ranks with replicas
have not dispatched yet.

**The rule.** Let a *shared* collective be one whose process group contains ranks of several EP
groups: parameter gathers, gradient reductions, and the attention's collectives where a tensor- or
context-parallel group spans several EP groups. Every rank dispatches and awaits all shared
collectives at points of its program that do not depend on plans:

- Forward, before the attention in front of a layer of experts: wait for the layer's parameters,
  then dispatch the gathers of the next layer's (`finish_gathers`). A layer without an attention in
  front does so before its router. A layer without replicas does the same.
- Backward, after the same attention's backward: start the reductions of the experts' gradients
  (`megatron.gradient_buckets`).
- All other shared collectives: where stock Megatron runs them.

Communication that depends on plans (fetches, returns, the exchange of tokens) is inside one EP
group, whose ranks have the same plan. So all ranks run one sequence of shared collectives, and each
EP group runs collectives of its own in between: a deadlock is impossible. Stock Megatron could run
the same sequence: its ``align_param_gather`` dispatches even earlier, all buckets of a model chunk
at once.

The attention waits no longer than experts do in stock Megatron. Either way a gather overlaps with
one layer: in stock Megatron from experts to experts, here from attention to attention. Where a
layer's experts fill several buckets this order is faster than stock Megatron's, which dispatches
each bucket when the previous one is complete.

The rule holds for every training forward, and with recomputation for its first pass. In the
backward all parameters are gathered already. Evaluation has no replicas and keeps stock Megatron's
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module


def gathers_params(module: Module) -> bool:
    """Whether DDP gathers the parameters of ``module`` in the background."""
    # DDP has a hook on every module; most modules have no hooks
    return bool(module._forward_pre_hooks) and bool(_ddp_hooks(module))


def wait_for_params(module: Module) -> None:
    """Wait until the parameters of ``module`` hold this iteration's values.

    With ``overlap_param_gather`` DDP gathers parameters in the background and waits in a forward
    pre-hook of the submodule that owns a parameter. Other code would silently read the last
    iteration's values, so the hooks run here.
    """
    if not gathers_params(module):
        return
    for submodule in module.modules():
        for hook in _ddp_hooks(submodule):
            hook(submodule, ())


def start_gathers(experts: Module) -> None:
    """Dispatch all gathers of the parameters of ``experts``, unless dispatched. Collective."""
    for group in _bucket_groups(experts):
        if not group.param_gather_dispatched:
            group.start_param_sync()


def finish_gathers(experts: Module, following: Module | None) -> None:
    """Wait for the parameters of ``experts``; then dispatch the gathers of ``following``.

    All ranks call it at the same point, with or without replicas. Does nothing where DDP gathers
    nothing.

    Args:
        experts: expert module of the next layer in the forward.
        following: expert module of the layer after it, in the same model chunk.
    """
    if not gathers_params(experts):
        return
    start_gathers(experts)
    for group in _bucket_groups(experts):
        # not by the chain of buckets, which would dispatch one bucket of the next layer
        group.finish_param_sync(skip_next_bucket_dispatch=True)
    if following is not None:
        start_gathers(following)


def _bucket_groups(experts: Module) -> list[Any]:
    """List the bucket groups of all parameters of ``experts``, in the order of the forward.

    Empty without hooks of DDP.
    """
    groups: dict[Any, None] = {}
    for hook in _ddp_hooks(experts):
        # the hook's closure holds its DDP
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        # frozen parameters have no bucket group
        by_parameter = cells["self"].cell_contents.param_to_bucket_group
        bucketed = [p for p in experts.parameters() if p in by_parameter]
        groups.update(dict.fromkeys(by_parameter[p] for p in bucketed))
    return list(groups)


def _ddp_hooks(module: Module) -> list[Callable]:
    """List DDP's forward pre-hooks of ``module``."""
    hooks = module._forward_pre_hooks.values()
    name = "DistributedDataParallel._make_forward_pre_hook"
    return [hook for hook in hooks if name in getattr(hook, "__qualname__", "")]
