"""FSSDP inside a training run: evaluation, skipped steps, loops of other shape, overflow, and ranks that die.

Oracle: the unconverted model on the same ranks and data, or literal messages.
"""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise

import pytest
from ranks import ranks


@ranks(2)
def test_evaluation_between_steps_changes_nothing() -> None:
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)

    def train(hook, evaluate: bool) -> tuple[list[float], list[float]]:
        run = tiny_gpt.train(case, steps=0, hook=hook)
        evaluated = []
        for step in range(4):
            run.step(step)
            if evaluate:
                for chunk in run.chunks:
                    chunk.eval()
                with torch.no_grad():
                    evaluated.append(tiny_gpt.run(case, run.chunks, 100 + step, num_microbatches=3, forward_only=True))
                for chunk in run.chunks:
                    chunk.train()
        return run.losses, evaluated

    hook = fssdp(HecateConfig(timeout=30))
    stock_losses, stock_evaluated = train(None, True)
    losses, evaluated = train(hook, True)
    assert losses == pytest.approx(stock_losses, rel=1e-5)
    assert evaluated == pytest.approx(stock_evaluated, rel=1e-5)
    assert losses == train(hook, False)[0], "evaluation must not change training by a bit"


@ranks(2)
def test_skipped_steps_and_replanning() -> None:
    """A step that is skipped (gradient overflow) calls no optimizer: guests must still be planned and stay right."""
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)

    def train(hook) -> tuple[list[float], list]:
        run, seen = tiny_gpt.train(case, steps=0, hook=hook), []
        for step in range(6):
            if step in (2, 3):  # forward and backward, but no optimizer step
                for chunk in run.chunks:
                    chunk.zero_grad_buffer()
                run.losses.append(tiny_gpt.run(case, run.chunks, step, num_microbatches=2))
            else:
                run.step(step)
            if hook is not None:
                seen.append([layer.fssdp.guests for layer in tiny_gpt.moe_layers(run.chunks)])
        return run.losses, seen

    stock, _ = train(None)
    losses, seen = train(fssdp(HecateConfig(timeout=30)))
    assert losses == pytest.approx(stock, rel=1e-5)
    for before, after in pairwise(seen[1:]):
        for a, b in zip(before, after, strict=True):
            assert a is None or a is not b, "guests of one iteration were used in the next"
    assert any(guests is not None for step in seen for guests in step)
    assert torch.isfinite(torch.tensor(losses)).all()


@ranks(2)
def test_a_loop_without_the_microbatch_calculator() -> None:
    """Without Megatron's calculator nobody says how many microbatches there are: gradients go home with each."""
    import tiny_gpt
    from megatron.core import num_microbatches_calculator as calculator

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(accumulate=3)
    tiny_gpt.initialize(case)
    calculator.unset_num_microbatches_calculator()
    stock = tiny_gpt.train(case, steps=4)
    ours = tiny_gpt.train(case, steps=4, hook=fssdp(HecateConfig(timeout=30)))
    assert ours.guests > 0
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert ours.grad_norms == pytest.approx(stock.grad_norms, rel=1e-5)


@ranks(2)
def test_fewer_microbatches_than_announced_is_an_error() -> None:
    import tiny_gpt
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(timeout=30)))
    replicas = parallel_state.get_data_parallel_world_size()
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, 2 * 4 * replicas, 2, replicas)  # says 4; the loop runs 2
    with pytest.raises(RuntimeError, match=r"gradients of guests wait .* 4 microbatches; .* layer 1 \(2 of 4\)"):
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
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(timeout=30)))
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
    lends = any(layer.fssdp.guests is not None and layer.fssdp.guests.route.lent for layer in layers)
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
def test_bf16_with_a_bad_gradient_skips_the_step_as_stock_does() -> None:
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp, slots

    case = tiny_gpt.Case(bf16=True)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(timeout=30)))
    backward = slots.Guests.backward

    def plant(self, home_grads, guest_grads):
        if self.num_guests:
            guest_grads[0].view(-1)[0] = float("inf")
        return backward(self, home_grads, guest_grads)

    slots.Guests.backward = plant
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    tiny_gpt.run(case, run.chunks, 2, num_microbatches=1)
    found = torch.zeros(1)
    for chunk in run.chunks:
        for p in chunk.parameters():
            found += float(not torch.isfinite(p.main_grad).all())
    torch.distributed.all_reduce(found)
    assert found > 0, "the guest's infinity never came home"
    norm = run.optimizer.get_grad_norm() if hasattr(run.optimizer, "get_grad_norm") else None
    assert norm is None or not torch.isfinite(torch.as_tensor(norm))


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
        return fssdp(HecateConfig(timeout=30))(chunks)

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
    ours = tiny_gpt.train(case, hook=lambda c: fssdp(HecateConfig(timeout=30))(freeze(c)))
    assert ours.guests > 0 and ours.losses == pytest.approx(stock.losses, rel=1e-5)


@ranks(2)
def test_loaded_weights_replace_guests() -> None:
    """Weights that are loaded between two forwards of one iteration: no guest may compute with the old ones."""
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    hook = fssdp(HecateConfig(timeout=30))

    def evaluate(run) -> float:
        with torch.no_grad():
            return tiny_gpt.run(case, run.chunks, 50, num_microbatches=1, forward_only=True)

    def scenario(hook) -> list[float]:
        run = tiny_gpt.train(case, steps=2, hook=hook)
        for chunk in run.chunks:
            chunk.eval()
        seen = [evaluate(run)]
        state = {k: v * 0.5 if torch.is_tensor(v) else v for k, v in run.chunks[0].state_dict().items()}
        run.chunks[0].load_state_dict(state)
        seen.append(evaluate(run))
        return seen

    stock, ours = scenario(None), scenario(hook)
    assert ours == pytest.approx(stock, rel=1e-5) and abs(stock[0] - stock[1]) > 1e-3


@ranks(2, killed=frozenset({1}))
def test_a_peer_that_dies_in_training_is_named() -> None:
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp
    from megatron_hecate.collectives import TransferError

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(timeout=10)))
    assert run.guests > 0

    def die() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    state = tiny_gpt.moe_layers(run.chunks)[0].fssdp
    plan = state._plan
    state._plan = lambda: (die(), plan())[1]  # just before the first layer's fetch
    start = time.monotonic()
    with pytest.raises(TransferError, match=r"layer 1: sparse_all_gather failed on rank 0 of 2 .* rank 1"):
        run.step(2)
    assert time.monotonic() - start < 20
