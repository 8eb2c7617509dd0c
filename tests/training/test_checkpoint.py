"""Megatron's distributed checkpoints, model and optimizer: from FSSDP to stock and back, bitwise, and to another EP size,
also of a model whose homes have moved.

Oracle: before it is saved, weights and moments are read by hand, place by place, and named by the homes that the layers
say they have; what is loaded must be these. Both models go on alike.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
from checkpoints import METADATA, load, save, shared_folder
from ranks import ranks
from rehoming_hooks import hashes, homes_of, rehoming_hook

# Megatron's format that keeps the distributed optimizer's buckets whole
BY_BUCKET = {**METADATA, "distrib_optim_sharding_type": "dp_reshardable"}


def _hook(kind: str) -> Any:
    if kind == "stock":
        return None
    return rehoming_hook() if kind == "moved" else tiny_gpt.fssdp_hook()


@pytest.mark.parametrize(
    ("writer", "reader", "distributed_optimizer", "metadata"),
    [
        ("FSSDP", "stock", True, METADATA),
        pytest.param("stock", "FSSDP", False, METADATA, marks=pytest.mark.slow),
        ("moved", "stock", True, METADATA),
        pytest.param("moved", "moved", False, METADATA, marks=pytest.mark.slow),
        pytest.param("moved", "stock", True, BY_BUCKET, marks=pytest.mark.slow),
    ],
    ids=["to-stock", "from-stock", "moved-to-stock", "moved", "buckets"],
)
@ranks(2)
def test_bitwise_between_two_models(
    writer: str, reader: str, distributed_optimizer: bool, metadata: dict
) -> None:
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
