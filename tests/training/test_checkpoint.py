"""Megatron's distributed checkpoints, model and optimizer: FSSDP to stock and back, bitwise, and to another EP size.

Oracle: the values that were saved, gathered from all ranks by global expert, and the stock model that continues.
"""

from __future__ import annotations

import pytest
from checkpoints import load, save, shared_folder
from ranks import ranks
from rehoming_hooks import hashes


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
    assert hashes(read) == hashes(written) and any(" exp_avg" in name for name in hashes(read))
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
    before = {name: of for name, of in hashes(written).items() if " exp_avg" not in name}
    expected = [written.step(s) for s in (3, 4)]

    parallel_state.destroy_model_parallel()
    narrow = tiny_gpt.Case(ep=2, distributed_optimizer=True)
    tiny_gpt.initialize(narrow)
    read = tiny_gpt.train(narrow, steps=2)
    load(read, folder)
    assert before and before.items() <= hashes(read).items()
    assert [read.step(s) for s in (3, 4)] == pytest.approx(expected, rel=1e-5)
