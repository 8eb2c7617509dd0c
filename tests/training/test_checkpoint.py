"""Megatron's distributed checkpoints, model and optimizer: FSSDP to stock and back, bitwise, and to another EP size.

Oracle: the values that were saved, gathered from all ranks by global expert, and the stock model that continues.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from checkpoints import load, save, shared_folder
from ranks import ranks


def _values(run) -> dict:
    """Parameters and optimizer moments of all ranks, experts under their global number."""
    import tiny_gpt
    from megatron.core import parallel_state

    own = {}
    first = (
        parallel_state.get_expert_model_parallel_rank()
        * tiny_gpt.moe_layers(run.chunks)[0].num_local_experts
    )
    for name, p in run.chunks[0].module.named_parameters():
        if ".local_experts." in name:
            head, tail = name.split(".local_experts.")
            local, rest = tail.split(".", 1)
            name = f"{head}.experts.{first + int(local)}.{rest}"
        own[name] = p.detach().clone()
    moments = []
    for optimizer in run.optimizer.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            for p in group["params"]:
                moments += [
                    (k, v.clone())
                    for k, v in optimizer.optimizer.state[p].items()
                    if torch.is_tensor(v)
                ]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return {"params": {k: v for part in gathered for k, v in part.items()}, "moments": moments}


def _equal(a: dict, b: dict) -> None:

    assert a["params"].keys() == b["params"].keys()
    for name, value in a["params"].items():
        assert torch.equal(value, b["params"][name]), name


@pytest.mark.parametrize(
    ("direction", "distributed_optimizer"),
    [("to stock", True), pytest.param("from stock", False, marks=pytest.mark.slow)],
)
@ranks(2)
def test_bitwise_between_stock_and_fssdp(direction: str, distributed_optimizer: bool) -> None:
    import tiny_gpt

    hook = tiny_gpt.fssdp_hook()
    writer, reader = (hook, None) if direction == "to stock" else (None, hook)
    case = tiny_gpt.initialized(distributed_optimizer=distributed_optimizer)
    written = tiny_gpt.train(case, steps=3, hook=writer)
    folder = shared_folder("checkpoint")
    save(written, folder)
    read = tiny_gpt.train(
        case, steps=2, hook=reader
    )  # somewhere else, with replicas in use when it is FSSDP
    load(read, folder)
    before, after = _values(written), _values(read)
    _equal(before, after)
    assert len(before["moments"]) == len(after["moments"]) > 0
    for (name, a), (other, b) in zip(before["moments"], after["moments"], strict=True):
        assert name == other and torch.equal(a, b), name
    # and both go on alike
    assert [read.step(s) for s in (3, 4, 5)] == pytest.approx(
        [written.step(s) for s in (3, 4, 5)], rel=1e-5
    )


@ranks(4)
def test_into_another_ep_size() -> None:
    import tiny_gpt
    from megatron.core import parallel_state

    hook = tiny_gpt.fssdp_hook()
    wide = tiny_gpt.Case(ep=4, distributed_optimizer=True)
    tiny_gpt.initialize(wide)
    written = tiny_gpt.train(wide, steps=3, hook=hook)
    assert written.replicas > 0
    folder = shared_folder("checkpoint")
    save(written, folder)
    before = _values(written)
    expected = [written.step(s) for s in (3, 4)]

    parallel_state.destroy_model_parallel()
    narrow = tiny_gpt.Case(ep=2, distributed_optimizer=True)
    tiny_gpt.initialize(narrow)
    read = tiny_gpt.train(narrow, steps=2)
    load(read, folder)
    _equal(before, _values(read))
    assert [read.step(s) for s in (3, 4)] == pytest.approx(expected, rel=1e-5)
