"""Training runs that go wrong: bad gradients, overflow, ranks that die or sleep, loops that break off.

Oracle: what stock Megatron does in the same place, or literal messages.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from ranks import ranks


@ranks(2)
def test_fewer_microbatches_than_announced_is_an_error() -> None:
    import tiny_gpt
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30)))
    replicas = parallel_state.get_data_parallel_world_size()
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, 2 * 4 * replicas, 2, replicas)  # says 4; the loop runs 2
    with pytest.raises(
        RuntimeError, match=r"FusedAdam steps while gradients of guests wait .* 4 microbatches; .* layer 1 \(2 of 4\)"
    ):
        run.step(2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@ranks(2)
def test_bad_gradients_of_a_guest_reach_megatrons_own_check(value: float) -> None:
    """Stock Megatron stops on a NaN gradient (check_for_nan_in_grad); a guest's NaN must arrive there, on its home."""
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp, slots

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30)))
    layers = tiny_gpt.moe_layers(run.chunks)
    hosts = [layer for layer in layers if layer.fssdp.placement.is_guest[dist.get_rank()].any()]
    counts = [None, None]
    dist.all_gather_object(counts, len(hosts))
    assert sum(counts) > 0
    backward = slots.Guests.backward

    def plant(self, home_grads, guest_grads):
        if self.num_guests and guest_grads[0] is not None:
            guest_grads[0].view(-1)[0] = value
        return backward(self, home_grads, guest_grads)

    slots.Guests.backward = plant
    lends = any(layer.fssdp.guests is not None and layer.fssdp.guests.what.route.lent for layer in layers)
    message = "NaN|nan|Inf|inf|Unexpected"
    try:
        run.step(2)
        stopped = False
    except (AssertionError, RuntimeError) as error:
        stopped = True
        if lends:
            assert any(word in str(error) for word in message.split("|")), error
    assert stopped, "a rank went on with a bad gradient at home"
    os._exit(0)  # the other rank may be left in Megatron's all-reduce, as in stock


@ranks(2)
def test_overflow_in_a_guest_skips_the_step_as_in_stock() -> None:
    """fp16 with loss scaling: an infinity in a guest's gradient makes Megatron skip the step on all ranks."""
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp, slots

    case = tiny_gpt.Case(fp16=True, accumulate=2)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30)))
    backward, planted = slots.Guests.backward, []

    def plant(self, home_grads, guest_grads):
        if self.num_guests and not planted:
            planted.append(1)
            guest_grads[0].view(-1)[0] = float("inf")
        return backward(self, home_grads, guest_grads)

    before = {name: p.detach().clone() for name, p in run.chunks[0].named_parameters()}
    scale = float(run.optimizer.get_loss_scale())
    slots.Guests.backward = plant
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    tiny_gpt.run(case, run.chunks, 2, num_microbatches=2)
    updated, _, _ = run.optimizer.step()
    slots.Guests.backward = backward
    count = torch.tensor(float(len(planted)))
    torch.distributed.all_reduce(count)
    assert count > 0 and not updated
    assert all(torch.equal(p, before[name]) for name, p in run.chunks[0].named_parameters())
    assert float(run.optimizer.get_loss_scale()) <= scale
    assert torch.isfinite(torch.tensor(run.step(3))), "and training goes on"


@ranks(2)
def test_partly_frozen_experts_are_refused() -> None:
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)

    def freeze_half(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            for expert in layer.experts.local_experts:
                expert.linear_fc1.weight.requires_grad_(False)
        return fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30))(chunks)

    with pytest.raises(ValueError, match="layer 1: some expert parameters are frozen and others are not"):
        tiny_gpt.train(case, steps=2, hook=freeze_half)


@ranks(2)
def test_frozen_experts_train_the_rest() -> None:
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)

    def freeze(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            layer.experts.requires_grad_(False)
        return chunks

    stock = tiny_gpt.train(case, hook=freeze)
    ours = tiny_gpt.train(case, hook=lambda c: fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30))(freeze(c)))
    assert ours.guests > 0 and ours.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("before its fetch", r"layer 1: gathering the loads failed on rank 0 of 2 .* ranks \[0, 1\]"),
        ("before its experts, without a fetch", r"layer 1: sparse_all_gather failed on rank 0 of 2 .* rank 1"),
    ],
)
@ranks(2, killed=frozenset({1}))
def test_a_peer_that_dies_in_training_is_named(when: str, message: str) -> None:
    """Fetches run in the background, so whatever a layer waits for first names the dead peer's layer and ranks."""
    from types import SimpleNamespace

    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp, slots
    from megatron_hecate.p2p import TransferError

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=10)))
    assert run.guests > 0
    state = tiny_gpt.moe_layers(run.chunks)[0].fssdp
    plan = state._plan

    def die() -> None:
        time.sleep(0.5)  # what was sent arrives
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1 and when == "before its fetch":
        state._plan = lambda: (die(), plan())[1]
    elif dist.get_rank() == 1:
        slots.start_gather = lambda *args, **kwargs: SimpleNamespace(wait=lambda: None)
        slots.Guests.materialize = lambda *args: die()
    start = time.monotonic()
    with pytest.raises(TransferError, match=message):
        run.step(2)
    assert time.monotonic() - start < 20


@ranks(2)
def test_a_peer_that_sleeps_in_training_is_named() -> None:
    """In the exchange of loads, which is a collective of the group: the layer and the ranks are named, in time."""
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, dispatcher, fssdp, quotas
    from megatron_hecate.p2p import TransferError

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=3)))
    assert run.guests > 0
    if dist.get_rank() == 1:
        quotas.gather_loads = lambda *args, **kwargs: (time.sleep(8), dispatcher.gather_loads(*args, **kwargs))[1]
    start = time.monotonic()
    with pytest.raises((TransferError, RuntimeError)) as error:
        run.step(2)
    if dist.get_rank() == 0:
        assert time.monotonic() - start < 7
        assert "layer 1: gathering the loads failed on rank 0 of 2" in str(error.value)
        assert "(timeout 3 s): expected all of ranks [0, 1]" in str(error.value)


@ranks(2)
def test_a_given_up_step_does_not_spoil_the_next() -> None:
    """One microbatch of two runs, then the loop starts over: an error once, and right results afterwards."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=4)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30)))
    tiny_gpt.run(case, run.chunks, 2, num_microbatches=1)
    # the counts have shifted by one, so the optimizer finds an iteration that is not complete
    with pytest.raises(RuntimeError, match=r"FusedAdam steps while .* layer 1 \(1 of 2\), layer 2 \(1 of 2\)"):
        run.step(2)
    assert [run.step(2), run.step(3)] == pytest.approx(stock.losses[2:], rel=1e-5)


@ranks(2)
def test_checkpointing_that_hides_forwards_is_refused() -> None:
    import tiny_gpt
    import torch
    from torch.utils.checkpoint import checkpoint

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)

    def reentrant(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            forward = layer.forward
            layer.forward = lambda x, *a, _f=forward, **k: checkpoint(lambda y: _f(y), x, use_reentrant=True)
        return chunks

    assert torch.is_grad_enabled()
    with pytest.raises(NotImplementedError, match=r"layer \d is recomputed in the backward, .* use_reentrant=False"):
        tiny_gpt.train(case, hook=lambda c: reentrant(fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30))(c)))
