"""Frameworks that train between rollouts: equal to stock Megatron, or refused at once with the way out.

Oracle: stock Megatron in the same loop, on the same ranks and data. Each loop is written after the
source of a framework; ``docs/frameworks.md`` names files and versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from typing import Any
from unittest import mock

import loops
import pytest
import reloadable_groups
import tiny_gpt
import torch
import torch.distributed as dist
import variants
from layout_tables import LAYOUTS
from ranks import ranks

import megatron_hecate


def _export_and_load(loop: Any) -> None:
    """verl, ROLL: weights are exported for the rollout by name and loaded again."""
    exported = {name: p.detach().clone() for name, p in loop.chunks[0].module.named_parameters()}
    with torch.no_grad():
        for name, p in loop.chunks[0].module.named_parameters():
            p.data.fill_(float("nan"))
            p.data.copy_(exported[name])


def _optimizer_to_host(loop: Any) -> None:
    """verl, NeMo-RL: the state of the optimizer moves to the host and back."""
    for optimizer in getattr(loop.optimizer, "chained_optimizers", [loop.optimizer]):
        for state in optimizer.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value):
                    state[name] = value.cpu().clone()
                    value.fill_(float("nan"))


def _offload_and_reload(loop: Any) -> None:
    """verl, ms-swift: Megatron's own offloading of DDP's buffers."""
    for buffer in loop.buffers:
        # a copy: on CPU ranks ``.cpu()`` is the tensor itself
        if buffer.param_data is not None and buffer.param_data_cpu is None:
            buffer.param_data_cpu = torch.empty_like(buffer.param_data)
        buffer.offload_to_cpu(move_params=True, move_grads=True)
    for buffer in loop.buffers:
        buffer.reload_from_cpu(move_params=True, move_grads=True)


def _empty_storages(loop: Any) -> None:
    """verl, ms-swift: storages of DDP's buffers are emptied for the rollout, and filled again."""
    for buffer in loop.buffers:
        for data in (buffer.grad_data, buffer.param_data):
            if data is not None:
                values, size = data.clone(), data.untyped_storage().size()
                data.untyped_storage().resize_(0)
                data.untyped_storage().resize_(size)
                data.copy_(values)


def _replace_param_data(loop: Any) -> None:
    for p in loop.parameters:
        old = p.data
        p.data = old.clone()
        old.fill_(float("nan"))


def _swap_reference(loop: Any) -> None:
    """slime: weights of reference and old policy are copied into the same parameters in turn, and back."""
    for _ in range(2):
        with loop.scaled(0.5):
            loop.evaluate(0)


def _pause_without_copy(loop: Any) -> None:
    """torch_memory_saver without a copy on the host: all of our buffers hold garbage afterwards."""
    for layer in tiny_gpt.moe_layers(loop.chunks):
        pool = layer.prefetcher.pool
        for buffer in (*pool._weights, *pool._grads):
            buffer.memory.fill_(0xFF)
        pool.transport._staging.fill_(0xFF)


def _release(loop: Any) -> None:
    megatron_hecate.release(loop.chunks)


def _renew_groups(loop: Any) -> None:
    """slime: Megatron's groups are wrapped, destroyed for each rollout and made again behind the wrapper."""
    assert reloadable_groups.destroy() > 10
    reloadable_groups.reload()


# what happens between two steps, and settings of FSSDP; all of it leaves weights as they were
WITH_BUFFERS = {
    "weights exported and loaded": (_export_and_load, {}),
    "optimizer state on the host": (_optimizer_to_host, {}),
    "Megatron's offload_to_cpu": (_offload_and_reload, {}),
    "storages emptied": (_empty_storages, {}),
    "reference weights copied in": (_swap_reference, {}),
    "pause without a copy": (_pause_without_copy, {}),
    "memory released": (_release, {}),
    "memory released, lifetime layer": (_release, dict(lifetime="layer")),
    "process groups destroyed and made again": (_renew_groups, {}),
}
WITHOUT_BUFFERS = {"param.data replaced": (_replace_param_data, {})}


@pytest.mark.parametrize("has_buffers", [True, False])
@ranks(2, timeout=300)
def test_between_two_steps(has_buffers: bool) -> None:
    """Beside log-probabilities in train and eval mode. DDP's buffers hold parameters, or do not."""
    reloadable_groups.install()
    case = tiny_gpt.initialized(distributed_optimizer=has_buffers, skew=4)

    def pattern_with(act: Any) -> Any:
        def between(loop: loops.Loop, step: int) -> None:
            loops.log_probabilities_in_train_mode(loop, step)
            loop.evaluate(step)
            act(loop)

        return loops.call_and(between)

    stock = loops.train_pattern(case, pattern_with(lambda loop: None), None)
    for name, (act, settings) in (WITH_BUFFERS if has_buffers else WITHOUT_BUFFERS).items():
        hook = tiny_gpt.fssdp_hook(**settings)
        loops.assert_equal(stock, loops.train_pattern(case, pattern_with(act), hook), name)


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
    from megatron.core.utils import get_model_config

    case = tiny_gpt.initialized(skew=4)
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
    run.zero()
    config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
    with run.chunks[0].no_sync():
        run.call(3, 1)
        replicas = [layer.fssdp.current.replicas for layer in tiny_gpt.moe_layers(run.chunks)]
        replicas = [one for one in replicas if one is not None]
        assert any(one.is_accumulating for one in replicas)
        assert megatron_hecate.release(run.chunks) == freed
        assert not any(one.is_accumulating for one in replicas)


@ranks(2)
def test_a_default_process_group_that_is_replaced_is_refused() -> None:
    """slime's default: all groups go, and those that FSSDP needs are unknown to slime."""
    reloadable_groups.install()
    case = tiny_gpt.initialized(skew=4)
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
    assert run.replicas > 0
    reloadable_groups.replace_world(os.environ["TEST_FOLDER"])
    with pytest.raises(RuntimeError, match="SLIME_DESTROY_WORLD_PROCESS_GROUP=0"):
        run.step(2)


BF16_MAIN_GRADS = "tensors-bf16-main-grads"


def _leave(model: Any, step: int) -> None:
    """A loop has offloaded main gradients, which are back in a pre-hook of the forward, after FSSDP's."""
    grads = [(p, p.main_grad) for p in model.parameters]
    for p, _ in grads:
        p.main_grad = None

    def bring_back(*_: Any) -> None:
        for p, grad in grads:
            p.main_grad = grad
        hook.remove()

    hook = model.chunks[0].module.module.register_forward_pre_hook(bring_back)


def _wrap_again(model: Any, step: int) -> None:
    """An iteration has begun when DDP is made anew, with main gradients of the other type."""
    if step == 2:
        model.forward(50, 0)
        (chunk,) = (wrapped.module.module for wrapped in model.chunks)
        model.case = dataclasses.replace(model.case, grad_reduce_in_fp32=True)
        model.chunks, model.optimizer = tiny_gpt.wrap(model.case, [chunk], chunk.config)


@pytest.mark.newest
@pytest.mark.parametrize("change", [_leave, _wrap_again])
@ranks(2, preload=LAYOUTS[BF16_MAIN_GRADS].packages)
def test_main_gradients_that_change_before_a_forward(change: Any) -> None:
    case, prepare = variants.case_of(LAYOUTS[BF16_MAIN_GRADS])
    runs = []
    for hook in (list, tiny_gpt.fssdp_hook()):
        model = tiny_gpt.Trained(case, lambda chunks, hook=hook: hook(prepare(chunks)))
        for step in range(4):
            model.zero()
            change(model, step)
            with mock.patch.object(model, "zero"):
                model.step(step)
        model.gather_params()
        runs.append(model)
    tiny_gpt.assert_trained_alike(*runs, tolerance=tiny_gpt.BF16_TOLERANCE)


@pytest.mark.newest
@ranks(2, preload=LAYOUTS[BF16_MAIN_GRADS].packages)
def test_main_gradients_of_several_types_are_refused() -> None:
    """Stock trains so where GEMMs write each gradient alone."""
    case, prepare = variants.case_of(LAYOUTS[BF16_MAIN_GRADS])
    patterns = dict(param_name_patterns_for_fp32_local_accumulation=("*linear_fc1*",))
    case = dataclasses.replace(case, ddp=tuple(patterns.items()))
    with pytest.raises(
        ValueError, match="main gradients of experts and their replicas have dtypes"
    ):
        tiny_gpt.train(case, hook=lambda chunks: tiny_gpt.fssdp_hook()(prepare(chunks)))
