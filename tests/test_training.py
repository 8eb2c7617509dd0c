"""FSSDP inside a training run: evaluation, skipped steps, loops of other shape, what is planned and fetched when.

Oracle: the unconverted model on the same ranks and data.
"""

from __future__ import annotations

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

    hook = fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30))
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
    losses, seen = train(fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30)))
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
    ours = tiny_gpt.train(case, steps=4, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30)))
    assert ours.guests > 0
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert ours.grad_norms == pytest.approx(stock.grad_norms, rel=1e-5)


@ranks(2)
def test_loaded_weights_replace_guests() -> None:
    """Weights that are loaded between two forwards of one iteration: no guest may compute with the old ones."""
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    hook = fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30))

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


@ranks(2)
def test_guests_come_and_go_and_are_fetched_once_per_iteration() -> None:
    """With and without guests in turn; each layer with guests fetches once and reduces once per iteration."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp, slots

    case = tiny_gpt.Case(accumulate=3)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=6)
    calls: list[str] = []
    for name in ("start_gather", "start_reduce"):
        original = getattr(slots, name)
        setattr(slots, name, lambda *a, _f=original, _n=name, **k: (calls.append(f"{_n} {k['label']}"), _f(*a, **k))[1])
    run = tiny_gpt.train(case, steps=0, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30)))
    layers = tiny_gpt.moe_layers(run.chunks)
    for step in range(6):
        for layer in layers:
            plan = type(layer.fssdp)._plan
            layer.fssdp._plan = lambda s=layer.fssdp: plan(s) if step % 2 else s.homes_only  # noqa: B023
        calls.clear()
        run.step(step)
        expected = []
        if step % 2:
            assert all(layer.fssdp.guests is not None for layer in layers)
            expected = ["start_gather layer 1", "start_gather layer 2"]
            expected += ["start_reduce layer 2", "start_reduce layer 1"]
        assert calls == expected, step
        alive = {guests.label for guests in layers[0].fssdp.model.guests}
        assert len(layers[0].fssdp.model.guests) == len(alive) == len(expected) // 2, "old guests keep their memory"
    assert run.losses == pytest.approx(stock.losses, rel=1e-5)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=1e-5)


@ranks(2)
def test_every_layer_lends_its_own_hottest_expert() -> None:
    """Layer l's hottest expert is 5 (l - 1) mod 8 by construction: that one is lent, from that layer's own loads."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(accumulate=4, skew=4.0, settings=(("num_layers", 3),))
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=1, timeout=30)))
    lent = [[e for e, _, _ in layer.fssdp.placement.guests] for layer in tiny_gpt.moe_layers(run.chunks)]
    assert lent == [[0], [5], [2]], lent
    none = tiny_gpt.train(case, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=1, overlap_degree=0, timeout=30)))
    assert none.guests == 0


@ranks(2)
def test_only_training_forwards_make_the_forecast() -> None:
    """Neither recomputed nor evaluated tokens count: an iteration's loads sum to its tokens times top-k."""
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp

    settings = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
    case = tiny_gpt.Case(accumulate=2, settings=settings)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=0, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30)))
    monitor = tiny_gpt.moe_layers(run.chunks)[0].fssdp.model.monitor
    append, loads = monitor.history.append, []
    monitor.history.append = lambda load: (loads.append(load.sum(axis=1).tolist()), append(load))[1]
    for step in range(3):
        run.step(step)
        for chunk in run.chunks:
            chunk.eval()
        with torch.no_grad():
            tiny_gpt.run(case, run.chunks, 100 + step, num_microbatches=2, forward_only=True)
        for chunk in run.chunks:
            chunk.train()
    monitor.finish_reduce()
    tokens = 2 * 2 * case.micro_batch * case.seq  # ranks, microbatches
    assert loads == [[2 * tokens] * 2] * 3


@ranks(2)
def test_gradients_of_bf16_guests_are_summed_in_fp32() -> None:
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp, slots

    case = tiny_gpt.Case(bf16=True, accumulate=2)
    tiny_gpt.initialize(case)
    seen = []
    original = slots.start_reduce
    slots.start_reduce = lambda grads, *a, **k: (seen.extend(g.dtype for g in grads), original(grads, *a, **k))[1]
    run = tiny_gpt.train(case, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30)))
    assert run.guests > 0 and set(seen) == {torch.float32}


@ranks(2)
def test_batch_size_ramp_up_after_an_evaluation() -> None:
    import tiny_gpt
    import torch
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    replicas = parallel_state.get_data_parallel_world_size()

    def train(hook) -> list[float]:
        losses = []
        run = tiny_gpt.train(case, steps=0, hook=hook)
        for step, count in enumerate((2, 2, 4, 4)):
            calculator.unset_num_microbatches_calculator()
            calculator.init_num_microbatches_calculator(0, None, 2 * count * replicas, 2, replicas)
            for chunk in run.chunks:
                chunk.zero_grad_buffer()
            run.optimizer.zero_grad()
            losses.append(tiny_gpt.run(case, run.chunks, step, num_microbatches=count))
            run.optimizer.step()
            for chunk in run.chunks:
                chunk.eval()
            with torch.inference_mode():
                tiny_gpt.run(case, run.chunks, 50, num_microbatches=1, forward_only=True)
            for chunk in run.chunks:
                chunk.train()
        return losses

    assert train(fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30))) == pytest.approx(train(None), rel=1e-5)


@ranks(2)
def test_parameters_replaced_after_the_hook() -> None:
    """Initialization on the meta device replaces parameters after pre-wrap hooks ran: guests must follow."""
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)

    def replace(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            for expert in layer.experts.local_experts:
                for linear in (expert.linear_fc1, expert.linear_fc2):
                    fresh = torch.nn.Parameter(linear.weight.detach().clone())
                    fresh.__dict__.update(linear.weight.__dict__)
                    linear.weight = fresh
        return chunks

    stock = tiny_gpt.train(case, hook=replace, steps=4)
    ours = tiny_gpt.train(
        case, hook=lambda c: replace(fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30))(c)), steps=4
    )
    assert ours.guests > 0 and ours.losses == pytest.approx(stock.losses, rel=1e-5)


@ranks(2)
def test_hooks_of_users_fire_once() -> None:
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, timeout=30)))
    fired: list[str] = []
    layer = tiny_gpt.moe_layers(run.chunks)[0]
    layer.experts.register_forward_hook(lambda *_: fired.append("experts"))
    for index, expert in enumerate(layer.experts.local_experts):
        expert.register_forward_pre_hook(lambda *_, i=index: fired.append(f"expert {i}"))
    run.step(2)
    assert layer.fssdp.guests is not None
    assert sorted(fired) == ["expert 0", "expert 1", "expert 2", "expert 3", "experts"]
