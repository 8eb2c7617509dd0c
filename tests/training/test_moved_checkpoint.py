"""Checkpoints of a model whose homes have moved are Megatron's own, in plain order of experts, model and optimizer.

Oracle: before it is saved, weights and moments are read by hand, place by place, and put in order by the homes that the
layers say they have; what stock Megatron, or FSSDP, then loads must be these, bit for bit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from ranks import ranks
from test_checkpoint import METADATA, _folder
from test_rehoming import rehoming_hook

BY_BUCKET = {**METADATA, "distrib_optim_sharding_type": "dp_reshardable"}


def state_of(run: Any, metadata: dict, *, loading: bool) -> dict:
    model = run.chunks[0].module.sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": run.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata),
    }


def load(run: Any, folder: Path, metadata: dict = METADATA) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(state_of(run, metadata, loading=True), str(folder))
    run.chunks[0].module.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])


def save(run: Any, folder: Path, metadata: dict = METADATA) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(state_of(run, metadata, loading=False), str(folder))


def hashes(run: Any) -> dict[str, str]:
    """Of every parameter of the job, and of moments, under the expert's own number. Experts of this rank are whole, so
    that a shard of the distributed optimizer begins where its parameter does."""
    import tiny_gpt
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    numbers = {}
    for layer in tiny_gpt.moe_layers(run.chunks):
        rank, count = parallel_state.get_expert_model_parallel_rank(), layer.num_local_experts
        places = range(rank * count, (rank + 1) * count)
        if hasattr(layer, "fssdp"):
            places = layer.fssdp.homes.table[rank, :count].tolist()
        for i, expert in enumerate(layer.experts.local_experts):
            numbers |= {id(p): (i, places[i]) for p in expert.parameters()}
    states = {}
    for optimizer in run.optimizer.chained_optimizers:
        states |= {
            stepped.data_ptr(): state for stepped, state in optimizer.optimizer.state.items()
        }
    own = {}
    for name, p in run.chunks[0].module.named_parameters():
        if id(p) in numbers:
            place, expert = numbers[id(p)]
            name = name.replace(f"local_experts.{place}.", f"expert {expert} ")
        own[name] = p.detach()
        for kind, value in states.get(getattr(p, "main_param", p).data_ptr(), {}).items():
            if torch.is_tensor(value) and value.dim():
                own[f"{name} {kind}"] = value
    of_ranks: list[Any] = [None] * dist.get_world_size()
    mine = {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        for name, value in own.items()
    }
    dist.all_gather_object(of_ranks, mine)
    return {name: value for of_rank in of_ranks for name, value in of_rank.items()}


def homes_of(run: Any) -> Any:
    import tiny_gpt

    return tiny_gpt.moe_layers(run.chunks)[0].prefetcher.rehoming.homes


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("reader", ["stock", "fssdp", "moved"])
@ranks(2)
def test_into_stock_and_back(reader: str, distributed_optimizer: bool) -> None:
    import tiny_gpt

    case = tiny_gpt.Case(distributed_optimizer=distributed_optimizer)
    tiny_gpt.initialize(case)
    written = tiny_gpt.train(case, steps=5, hook=rehoming_hook())
    assert homes_of(written).are_moved
    before = hashes(written)
    save(written, _folder("checkpoint"))
    assert hashes(written) == before and not homes_of(written).are_moved
    hook = {"stock": None, "fssdp": tiny_gpt.fssdp_hook(), "moved": rehoming_hook()}[reader]
    read = tiny_gpt.train(case, steps=4, hook=hook)
    load(read, _folder("checkpoint"))
    assert hashes(read) == before and len(before) > 50
    assert [read.step(s) for s in (5, 6, 7)] == pytest.approx(
        [written.step(s) for s in (5, 6, 7)], rel=1e-5
    )
    assert homes_of(written).are_moved


@ranks(4)
def test_into_another_ep_size_and_back() -> None:
    """From EP 4 over EP 2 x EDP 2, with stock and with FSSDP, back to EP 4."""
    import tiny_gpt
    from megatron.core import parallel_state

    wide = tiny_gpt.Case(ep=4, distributed_optimizer=True)
    narrow = tiny_gpt.Case(ep=2, distributed_optimizer=True)
    tiny_gpt.initialize(wide)
    written = tiny_gpt.train(wide, steps=5, hook=rehoming_hook())
    assert homes_of(written).are_moved
    before, folder = hashes(written), _folder("wide")
    save(written, folder)
    expected = [written.step(s) for s in (5, 6)]
    for number, hook in enumerate((None, rehoming_hook())):
        parallel_state.destroy_model_parallel()
        tiny_gpt.initialize(narrow)
        read = tiny_gpt.train(narrow, steps=4, hook=hook)
        load(read, folder)
        parameters = {name: value for name, value in before.items() if " exp_avg" not in name}
        assert parameters.items() <= hashes(read).items()
        if hook is not None:  # its homes move again before it is saved
            tiny_gpt.run(
                narrow, read.chunks, 9, num_microbatches=1
            )  # the next iteration begins, and no step follows
            assert homes_of(read).are_moved
        folder = _folder(f"narrow {number}")
        save(read, folder)
    parallel_state.destroy_model_parallel()
    tiny_gpt.initialize(wide)
    read = tiny_gpt.train(wide, steps=2)
    load(read, folder)
    assert hashes(read) == before
    assert [read.step(s) for s in (5, 6)] == pytest.approx(expected, rel=1e-5)


@ranks(4)
def test_buckets_as_they_lie() -> None:
    """Megatron's format that keeps the distributed optimizer's buckets whole, for the same layout."""
    import tiny_gpt

    case = tiny_gpt.Case(ep=2, distributed_optimizer=True)
    tiny_gpt.initialize(case)
    written = tiny_gpt.train(case, steps=5, hook=rehoming_hook())
    assert homes_of(written).are_moved
    save(written, _folder("checkpoint"), BY_BUCKET)
    read = tiny_gpt.train(case, steps=2)
    load(read, _folder("checkpoint"), BY_BUCKET)
    assert hashes(read) == hashes(written)
    assert [read.step(s) for s in (5, 6, 7)] == pytest.approx(
        [written.step(s) for s in (5, 6, 7)], rel=1e-5
    )


@pytest.mark.newest
@ranks(2)
def test_asynchronous_saving() -> None:
    """Training goes on, and homes move again, while the checkpoint is written."""
    import tiny_gpt
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    case = tiny_gpt.Case(distributed_optimizer=True)
    tiny_gpt.initialize(case)
    written = tiny_gpt.train(case, steps=5, hook=rehoming_hook())
    assert homes_of(written).are_moved
    before, queue = hashes(written), AsyncCallsQueue()
    state = state_of(written, METADATA, loading=False)
    settings = dict(async_sharded_save=True, async_strategy="mcore")
    queue.schedule_async_request(
        dist_checkpointing.save(state, str(_folder("checkpoint")), **settings)
    )
    expected = [written.step(s) for s in (5, 6, 7)]
    assert homes_of(written).are_moved
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    read = tiny_gpt.train(case, steps=2)
    load(read, _folder("checkpoint"))
    assert hashes(read) == before
    assert [read.step(s) for s in (5, 6, 7)] == pytest.approx(expected, rel=1e-5)


@ranks(2)
def test_a_plain_state_dict_is_refused_while_homes_are_elsewhere() -> None:
    import tiny_gpt

    import megatron_hecate

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=5, hook=rehoming_hook())
    before = hashes(run)
    with pytest.raises(
        RuntimeError, match=r"moved homes of experts.*restore_homes\(model\) on all ranks"
    ):
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
