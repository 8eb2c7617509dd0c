"""Frameworks that train between rollouts: equal to stock Megatron, or refused at once with the way out.

Oracle: stock Megatron in the same loop, on the same ranks and data. Each loop is written after the
source of a framework; ``docs/frameworks.md`` names files and versions.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks

TOLERANCE = 1e-6  # of losses, relatively, and of parameters


def _train(case: Any, pattern: Any, hook: Any) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, parameters, and the tokens that replicas computed on all ranks."""
    import loops
    import tiny_gpt

    computed = torch.zeros(1)
    loop = loops.Loop(case, hook and tiny_gpt.counting_hook(hook, computed))
    losses = pattern(loop)
    dist.all_reduce(computed)
    return losses, {n: p.detach().clone() for n, p in tiny_gpt._named(loop.chunks)}, int(computed)


def _assert_equal_stock(case: Any, pattern: Any, **settings: Any) -> None:
    import tiny_gpt

    losses, params, _ = _train(case, pattern, None)
    ours, our_params, computed = _train(case, pattern, tiny_gpt.fssdp_hook(**settings))
    assert computed > 0, "no replica computed anything, so nothing was tested"
    loss = max(abs(a - b) / abs(a) for a, b in zip(losses, ours, strict=True))
    param = max(float((params[n] - our_params[n]).abs().max()) for n in params)
    assert loss <= TOLERANCE and param <= TOLERANCE, (loss, param)


def _between(act: Any) -> Any:
    """A loop that evaluates log-probabilities and calls ``act(loop, step)`` between its steps."""
    import loops

    def between(loop: loops.Loop, step: int) -> None:
        loops.log_probabilities_in_train_mode(loop, step)
        loop.evaluate(step)
        act(loop, step)

    return lambda loop: loops.steps(loop, between=between)


def _export_and_load(loop: Any, step: int) -> None:
    """verl, ROLL: weights are exported for the rollout by name and loaded again."""
    exported = {name: p.detach().clone() for name, p in loop.chunks[0].module.named_parameters()}
    with torch.no_grad():
        for name, p in loop.chunks[0].module.named_parameters():
            p.data.fill_(float("nan"))
            p.data.copy_(exported[name])


def _optimizer_to_host(loop: Any, step: int) -> None:
    """verl, NeMo-RL: the state of the optimizer moves to the host and back."""
    for optimizer in getattr(loop.optimizer, "chained_optimizers", [loop.optimizer]):
        for state in optimizer.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value):
                    state[name] = value.cpu().clone()
                    value.fill_(float("nan"))


def _offload_and_reload(loop: Any, step: int) -> None:
    """verl, ms-swift: Megatron's own offloading of DDP's buffers."""
    for buffer in loop.buffers:
        # a copy: on CPU ranks ``.cpu()`` is the tensor itself
        if buffer.param_data is not None and buffer.param_data_cpu is None:
            buffer.param_data_cpu = torch.empty_like(buffer.param_data)
        buffer.offload_to_cpu(move_params=True, move_grads=True)
    for buffer in loop.buffers:
        buffer.reload_from_cpu(move_params=True, move_grads=True)


def _replace_param_data(loop: Any, step: int) -> None:
    import loops

    loops.replace_param_data(loop, step)


def _empty_storages(loop: Any, step: int) -> None:
    import loops

    loops.empty_storages(loop, step)


def _swap_reference(loop: Any, step: int) -> None:
    """slime: policy, reference and old policy are copied into the same parameters in turn."""
    import loops

    for _ in range(2):
        loops.swap_in_reference(loop, step)


def _pause_without_copy(loop: Any, step: int) -> None:
    """torch_memory_saver without a copy on the host: all of our buffers hold garbage afterwards."""
    import tiny_gpt

    for layer in tiny_gpt.moe_layers(loop.chunks):
        if hasattr(layer, "fssdp"):
            pool = layer.prefetcher.buffers.allocated
            for buffer in (*pool._weights, *pool._grads):
                buffer._memory.fill_(0xFF)
            pool.transport._staging.fill_(0xFF)


def _release(loop: Any, step: int) -> None:
    import megatron_hecate

    megatron_hecate.release(loop.chunks)


# what happens between two steps, and whether DDP's buffers hold the parameters
BETWEEN = {
    "weights exported and loaded": (_export_and_load, True),
    "optimizer state on the host": (_optimizer_to_host, True),
    "Megatron's offload_to_cpu": (_offload_and_reload, True),
    "param.data replaced": (_replace_param_data, False),
    "storages emptied": (_empty_storages, True),
    "reference weights copied in": (_swap_reference, True),
    "pause without a copy": (_pause_without_copy, True),
    "memory released": (_release, True),
}
QUICK = ("Megatron's offload_to_cpu", "pause without a copy", "memory released")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in BETWEEN]
)
@ranks(2)
def test_between_two_steps(name: str) -> None:
    import tiny_gpt

    act, distributed_optimizer = BETWEEN[name]
    case = tiny_gpt.Case(distributed_optimizer=distributed_optimizer, skew=4)
    tiny_gpt.initialize(case)
    _assert_equal_stock(case, _between(act))


@pytest.mark.slow
@ranks(2)
def test_memory_released_with_lifetime_layer() -> None:
    import tiny_gpt

    case = tiny_gpt.Case(skew=4)
    tiny_gpt.initialize(case)
    _assert_equal_stock(case, _between(_release), lifetime="layer")


@pytest.mark.slow
@ranks(2)
def test_policy_reference_and_critic_in_one_process() -> None:
    """NeMo-RL, verl: the reference only evaluates; policy and critic train, and all give memory back."""
    import loops
    import tiny_gpt

    import megatron_hecate

    case = tiny_gpt.Case(distributed_optimizer=True, skew=4)
    tiny_gpt.initialize(case)

    def pattern(policy: loops.Loop) -> list[float]:
        critic = loops.Loop(case, policy.hook)
        reference, _ = tiny_gpt.build(case)
        losses = []
        for step in range(loops.STEPS):
            with tiny_gpt.evaluating(reference):
                losses.append(
                    tiny_gpt.run(case, reference, step, num_microbatches=2, forward_only=True)
                )
            for one in (policy, critic):
                loops.log_probabilities_in_train_mode(one, step)
                one.zero()
                losses.append(one.call(step, 2))
                one.update()
            for one in (policy, critic):
                megatron_hecate.release(one.chunks)
        return losses

    _assert_equal_stock(case, pattern)


def _live_bytes() -> int:
    """Bytes of all tensors that live in this process, each storage once."""
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor) and not torch._C._functorch.is_batchedtensor(value):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@ranks(2)
def test_bytes_before_during_and_after_a_release() -> None:
    """Oracle: the storages of all live tensors. Without a step there is nothing to free."""
    import tiny_gpt
    from megatron.core.utils import get_model_config

    import megatron_hecate

    case = tiny_gpt.Case(skew=4)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
    assert run.replicas > 0
    before = _live_bytes()
    freed = megatron_hecate.release(run.chunks)
    during = _live_bytes()
    # two layers of two slots, weights and gradients of 3 * 32 * 64 fp32 each, and what p2p receives
    assert freed >= 2 * 2 * 2 * 3 * 32 * 64 * 4 and before - during == freed
    assert megatron_hecate.release(run.chunks) == 0
    run.step(2)
    after = _live_bytes()
    assert abs(after - before) < freed / 10, (before, during, after)
    print(f"| bytes of rank {dist.get_rank()} | {before:,} | {during:,} | {after:,} |", flush=True)
    config = get_model_config(run.chunks[0])
    run.chunks[0].zero_grad_buffer()
    config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
    with run.chunks[0].no_sync():
        tiny_gpt.run(case, run.chunks, 3, num_microbatches=1)
        with pytest.raises(RuntimeError, match="call it after the optimizer's step"):
            megatron_hecate.release(run.chunks)


@ranks(2)
def test_process_groups_that_are_destroyed_and_made_again() -> None:
    """slime: Megatron's groups are wrapped, destroyed for each rollout and made again behind the wrapper."""
    import loops
    import reloadable_groups
    import tiny_gpt

    reloadable_groups.install()
    case = tiny_gpt.Case(distributed_optimizer=True, skew=4)
    tiny_gpt.initialize(case)

    def between(loop: loops.Loop, step: int) -> None:
        loops.log_probabilities_in_train_mode(loop, step)
        assert reloadable_groups.destroy() > 10
        reloadable_groups.reload()

    def pattern(loop: loops.Loop) -> list[float]:
        return loops.steps(loop, between=between)

    _assert_equal_stock(case, pattern)


@ranks(2)
def test_a_default_process_group_that_is_replaced_is_refused() -> None:
    """slime's default: all groups go, and those that FSSDP needs are unknown to slime."""
    import reloadable_groups
    import tiny_gpt

    reloadable_groups.install()
    case = tiny_gpt.Case(skew=4)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
    assert run.replicas > 0
    reloadable_groups.replace_world(os.environ["TEST_FOLDER"])
    with pytest.raises(RuntimeError, match="SLIME_DESTROY_WORLD_PROCESS_GROUP=0"):
        run.step(2)
