"""Megatron's distributed checkpoints, model and optimizer: from FSSDP to stock and back, bitwise, and to another EP size,
also of a model whose homes have moved; and whatever else reads weights of such a model, which gets them in plain order
of experts, or an error.

Oracle: before it is saved, weights and moments are read by hand, place by place, and named by the homes that the layers
say they have; what is loaded must be these. Both models go on alike. For exports, stock's parameters.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import tiny_gpt
import torch
from checkpoints import METADATA, load, save, shared_folder, state_of
from quick import quick
from ranks import ranks
from rehoming_hooks import hashes, homes_of, rehoming_hook

import megatron_hecate

# Megatron's format that keeps the distributed optimizer's buckets whole
BY_BUCKET = {**METADATA, "distrib_optim_sharding_type": "dp_reshardable"}


def _hook(kind: str) -> Any:
    if kind == "stock":
        return None
    return rehoming_hook() if kind == "moved" else tiny_gpt.fssdp_hook()


# who writes, who reads, whether optimizers are distributed, and Megatron's format
DIRECTIONS: dict[str, tuple[str, str, bool, dict]] = {
    "to-stock": ("FSSDP", "stock", True, METADATA),
    "from-stock": ("stock", "FSSDP", False, METADATA),
    "moved-to-stock": ("moved", "stock", True, METADATA),
    "moved": ("moved", "moved", False, METADATA),
    "buckets": ("moved", "stock", True, BY_BUCKET),
}


@pytest.mark.parametrize("direction", quick(DIRECTIONS, ["to-stock", "moved-to-stock"]))
@ranks(2)
def test_bitwise_between_two_models(direction: str) -> None:
    writer, reader, distributed_optimizer, metadata = DIRECTIONS[direction]
    case = tiny_gpt.initialized(distributed_optimizer=distributed_optimizer)
    written = tiny_gpt.train(case, steps=5, hook=_hook(writer))
    is_moved = writer == "moved"
    assert not is_moved or homes_of(written).are_moved
    before = hashes(written)
    save(written, shared_folder("checkpoint"), metadata)
    assert hashes(written) == before and not (is_moved and homes_of(written).are_moved)
    # somewhere else, with replicas in use when it is FSSDP
    read = tiny_gpt.train(case, steps=4, hook=_hook(reader))
    load(read, shared_folder("checkpoint"), metadata)
    assert hashes(read) == before and any(" exp_avg" in name for name in before)
    assert [read.step(s) for s in (5, 6, 7)] == pytest.approx(
        [written.step(s) for s in (5, 6, 7)], rel=1e-5
    )
    assert not is_moved or homes_of(written).are_moved


@pytest.mark.parametrize("is_back", [False, pytest.param(True, marks=pytest.mark.slow)])
@ranks(4)
def test_into_another_ep_size(is_back: bool) -> None:
    """From EP 4 to EP 2 x EDP 2; of homes that move, over FSSDP there, whose homes move as well, back to EP 4."""
    wide = tiny_gpt.Case(ep=4, distributed_optimizer=True)
    narrow = tiny_gpt.Case(ep=2, distributed_optimizer=True)
    tiny_gpt.initialize(wide)
    written = tiny_gpt.train(wide, steps=5, hook=_hook("moved" if is_back else "FSSDP"))
    assert written.replicas > 0 and (not is_back or homes_of(written).are_moved)
    before, folder = hashes(written), shared_folder("wide")
    parameters = {name: value for name, value in before.items() if " exp_avg" not in name}
    save(written, folder)
    expected = [written.step(s) for s in (5, 6)]
    for number, hook in enumerate((None, rehoming_hook()) if is_back else (None,)):
        tiny_gpt.parallel_state.destroy_model_parallel()
        tiny_gpt.initialize(narrow)
        read = tiny_gpt.train(narrow, steps=4, hook=hook)
        load(read, folder)
        assert parameters and parameters.items() <= hashes(read).items()
        if hook is not None:  # the next iteration begins, in which homes move, and no step follows
            read.call(9, 1)
            assert homes_of(read).are_moved
        folder = shared_folder(f"narrow {number}")
        save(read, folder)
    if is_back:
        tiny_gpt.parallel_state.destroy_model_parallel()
        tiny_gpt.initialize(wide)
        read = tiny_gpt.train(wide, steps=2)
        load(read, folder)
        assert hashes(read) == before
    assert [read.step(s) for s in (5, 6)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.newest
@ranks(2)
def test_asynchronous_saving() -> None:
    """Training goes on, and homes move again, while the checkpoint is written."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    case = tiny_gpt.initialized(distributed_optimizer=True)
    written = tiny_gpt.train(case, steps=5, hook=rehoming_hook())
    assert homes_of(written).are_moved
    before, queue = hashes(written), AsyncCallsQueue()
    state = state_of(written, METADATA, loading=False)
    settings = dict(async_sharded_save=True, async_strategy="mcore")
    queue.schedule_async_request(
        dist_checkpointing.save(state, str(shared_folder("checkpoint")), **settings)
    )
    expected = [written.step(s) for s in (5, 6, 7)]
    assert homes_of(written).are_moved
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    read = tiny_gpt.train(case, steps=2)
    load(read, shared_folder("checkpoint"))
    assert hashes(read) == before
    assert [read.step(s) for s in (5, 6, 7)] == pytest.approx(expected, rel=1e-5)


@ranks(2)
def test_a_plain_state_dict_is_refused_while_homes_are_elsewhere() -> None:
    case = tiny_gpt.initialized()
    run = tiny_gpt.train(case, steps=5, hook=rehoming_hook())
    before = hashes(run)
    message = r"moved homes of experts.*restore_homes\(model\) on all ranks"
    with pytest.raises(RuntimeError, match=message):
        run.chunks[0].state_dict()
    megatron_hecate.restore_homes(run.chunks)
    weights = {
        name: value.clone()
        for name, value in run.chunks[0].module.state_dict().items()
        if value is not None
    }
    assert hashes(run) == before
    run.step(5)
    with pytest.raises(RuntimeError, match="moved homes"):
        run.chunks[0].module.load_state_dict(weights)


def _reader(*args: Any) -> Iterator[tuple[str, Any]]:
    """As frameworks' exports, it reads parameters off the modules of the model that it gets last."""
    for chunk in args[-1]:
        yield from getattr(chunk, "module", chunk).named_parameters()


def _stock_and_ours(hook: Any) -> tuple[Any, Any]:
    """Trained for five steps; homes of ours have moved."""
    case = tiny_gpt.initialized()
    stock = tiny_gpt.train(case, steps=5)
    ours = tiny_gpt.train(case, steps=5, hook=hook)
    assert homes_of(ours).are_moved
    return stock, ours


def _assert_exported(ours: Any, stock: Any, exported: Iterator[tuple[str, Any]]) -> None:
    """Homes move back before the first parameter is read, and all of them are stock's."""

    weights = [p.detach().clone() for _, p in exported]
    assert not homes_of(ours).are_moved
    torch.testing.assert_close(weights, list(stock.params.values()), rtol=0, atol=1e-5)


def _assert_interrupted(ours: Any, begun: Iterator[tuple[str, Any]]) -> None:
    """An export that goes on when homes have moved again is an error."""
    next(begun)
    ours.step(5)
    assert homes_of(ours).are_moved
    with pytest.raises(RuntimeError, match="moved homes"):
        next(begun)


@ranks(2)
def test_weights_that_a_bridge_in_the_configuration_exports() -> None:
    """As ms-swift's. Oracle: stock's parameters."""

    class Bridge:
        loaded = 0

        def export_weights(self, chunk: Any) -> Iterator[tuple[str, Any]]:
            yield from _reader([chunk])

        def load_weights(self) -> None:
            self.loaded += 1

    def hook(chunks: list) -> list:
        chunks[0].config.bridge = Bridge()
        return rehoming_hook()(chunks)

    stock, ours = _stock_and_ours(hook)
    chunk = ours.chunks[0].module
    _assert_exported(ours, stock, chunk.config.bridge.export_weights(chunk))
    _assert_interrupted(ours, chunk.config.bridge.export_weights(chunk))
    copied = copy.deepcopy(chunk.config.bridge)
    copied.load_weights()
    assert (copied.loaded, chunk.config.bridge.loaded) == (1, 0)
    assert not homes_of(ours).are_moved


@ranks(2)
def test_a_configuration_that_is_copied_part_by_part() -> None:
    """Megatron-Bridge copies each object that a configuration holds, and sets the attributes of the copy."""
    case = tiny_gpt.initialized()
    config = tiny_gpt.train(case, steps=1, hook=tiny_gpt.fssdp_hook()).chunks[0].module.config
    assert config.no_sync_func is None, "it is set within a schedule's call only"
    for name, value in vars(config).items():
        assert not hasattr(value, "__dict__") or hasattr(copy.copy(value), "__dict__"), name


@ranks(2)
def test_weights_that_slime_reads_and_swaps() -> None:
    """By names of experts, through one module. Oracle: stock's parameters."""
    from megatron_hecate.megatron.frameworks import NAMED

    module = "slime.backends.megatron_utils.update_weight.common"
    weights = types.ModuleType(module)
    tiny_gpt.initialize(tiny_gpt.Case())
    with mock.patch.dict(sys.modules, {module: weights}):
        with pytest.raises(ValueError, match=f"{module} has no {NAMED[0]}"):
            tiny_gpt.build(tiny_gpt.Case(), rehoming_hook())
        tiny_gpt.parallel_state.destroy_model_parallel()
        vars(weights).update(dict.fromkeys(NAMED, _reader))
        stock, ours = _stock_and_ours(rehoming_hook())
    for name, args in zip(NAMED, [("args", ours.chunks), (ours.chunks,)], strict=True):
        assert homes_of(ours).are_moved
        _assert_exported(ours, stock, getattr(weights, name)(*args))
        for run in (stock, ours):
            run.step(5)
            run.read_params()
