"""Training loops that are not Megatron's: equal to stock, or refused with the way out.

Oracle: stock Megatron in the same loop. If replicas outlived a change of the weights, or gradients
waited for a backward that never comes, losses and parameters would differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import FULL
from ranks import ranks

GROUPS = 4


def _train(case: Any, pattern: Any, hook: Any) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, parameters, and the tokens that replicas computed on all ranks."""
    import loops
    import tiny_gpt

    computed = torch.zeros(1)
    loop = loops.Loop(case, hook and tiny_gpt.counting_hook(hook, computed))
    losses = pattern(loop)
    if case.overlap and case.distributed_optimizer:
        for chunk in loop.chunks:
            if hasattr(chunk, "start_param_sync"):
                chunk.start_param_sync(force_sync=True)
    dist.all_reduce(computed)
    return losses, {n: p.detach().clone() for n, p in tiny_gpt._named(loop.chunks)}, int(computed)


def _compare(case: Any, names: list[str], **settings: Any) -> None:
    import tiny_gpt

    tiny_gpt.initialize(case)
    for name in names:
        _compare_loop(case, name, **settings)


def _compare_loop(case: Any, name: str, **settings: Any) -> None:
    import loops
    import tiny_gpt

    pattern = (loops.PATTERNS | loops.TOLD | loops.ONLY_WITH_LIFETIME_LAYER)[name]
    losses, params, _ = _train(case, pattern, None)
    ours, our_params, computed = _train(case, pattern, tiny_gpt.fssdp_hook(**settings))
    assert computed > 0, f"{name}: no replica computed anything, so nothing was tested"
    loss = max(abs(a - b) / abs(a) for a, b in zip(losses, ours, strict=True))
    param = max(float((params[n].double() - our_params[n].double()).abs().max()) for n in params)
    if dist.get_rank() == 0:
        print(
            f"| {name} | {losses[-1]:.6f} | {ours[-1]:.6f} | {loss:.0e} | {param:.0e} | {computed} |",
            flush=True,
        )
    assert loss <= 1e-5 and param <= 1e-5, (name, loss, param)


# In ``make test``: one loop of each kind, some of them with ``overlap``; a kind is a reason for which an iteration could
# be taken to begin or end at the wrong place, or replicas be used at weights that are no more.
KINDS = (
    "calculator says no divisor",
    "forward without backward",
    "storages emptied between steps",
    "sharpness-aware by microbatch, buffer",
    "calls at other weights, one reduction",
    "two forwards, then two backwards",
    "roll back",
    "several calls per step, calculator",
    "own loop",
    "gradients of a call scaled by hand",
    "without DDP, own optimizer",
)
KINDS_WITH_OVERLAP = (
    "microbatches vary, no calculator",
    "average swapped in",
    "own loop, no_sync but last",
    "weights loaded between microbatches",
    "steps broken off",
    "two models, interleaved",
    "weights written in forward_step",
)


@ranks(2, timeout=300)
def test_loops_of_each_kind_equal_stock() -> None:
    import tiny_gpt

    _compare(tiny_gpt.Case(distributed_optimizer=True, skew=4), list(KINDS))


@ranks(2, timeout=300)
def test_loops_of_each_kind_equal_stock_with_overlap() -> None:
    import tiny_gpt

    case = tiny_gpt.Case(distributed_optimizer=True, overlap=True, skew=4)
    _compare(case, list(KINDS_WITH_OVERLAP))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(GROUPS))
@ranks(2)
def test_other_loops_equal_stock(part: int) -> None:
    import loops
    import tiny_gpt

    case = tiny_gpt.Case(distributed_optimizer=True, skew=4)
    _compare(case, [name for name in loops.PATTERNS if name not in KINDS][part::GROUPS])


@pytest.mark.parametrize("part", range(GROUPS))
@pytest.mark.slow
@ranks(2)
def test_loops_equal_stock_with_lifetime_layer(part: int) -> None:
    import loops
    import tiny_gpt

    _compare(tiny_gpt.Case(skew=4), list(loops.PATTERNS)[part::GROUPS], lifetime="layer")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(GROUPS))
@ranks(2)
def test_other_loops_equal_stock_with_overlap(part: int) -> None:
    import loops
    import tiny_gpt

    case = tiny_gpt.Case(distributed_optimizer=True, overlap=True, skew=4)
    names = [
        name
        for name in loops.PATTERNS
        if name not in {*loops.NOT_WITH_OVERLAP, *KINDS_WITH_OVERLAP}
        and not name.startswith("without")
    ]
    _compare(case, names[part::GROUPS])


@ranks(2)
def test_weights_written_in_forward_step() -> None:
    """In ways that show nowhere: the loop says so; of some experts only: other ranks may see none."""
    import loops
    import tiny_gpt

    case = tiny_gpt.Case(skew=4)
    _compare(case, list(loops.TOLD))
    for name in loops.TOLD:
        _compare_loop(case, name, lifetime="layer")
    forward_step = tiny_gpt.forward_step
    for lifetime in ("iteration", "layer"):
        run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook(lifetime=lifetime))
        weight = tiny_gpt.moe_layers(run.chunks)[-1].experts.local_experts[0].linear_fc1.weight
        calls: list[None] = []

        def write_and_step(
            *args: Any, weight: Any = weight, calls: list = calls, **kwargs: Any
        ) -> Any:
            calls.append(None)
            if len(calls) == 2:
                with torch.no_grad():
                    weight.mul_(1.1)
            return forward_step(*args, **kwargs)

        tiny_gpt.forward_step = write_and_step
        with pytest.raises(
            RuntimeError,
            match=r"layer 2: 1 of 8 weights .* megatron_hecate.weights_changed\(model\)",
        ):
            tiny_gpt.run(case, run.chunks, 2, num_microbatches=2)
        tiny_gpt.forward_step = forward_step


@ranks(2)
def test_steps_of_other_models_between_forwards_in_flight() -> None:
    """They may be steps of this model, as far as FSSDP knows: the error says so, and its way out is one."""
    import loops
    import tiny_gpt

    case = tiny_gpt.Case(skew=4)
    (name,) = loops.ONLY_WITH_LIFETIME_LAYER
    _compare(case, [name], lifetime="layer")
    said = r"layer 2: a backward needs .*lifetime iteration.* \w+ stepped, of this model or of another one, .*"
    with pytest.raises(RuntimeError, match=said + "or use --moe-fssdp-lifetime layer"):
        _train(case, loops.ONLY_WITH_LIFETIME_LAYER[name], tiny_gpt.fssdp_hook())


@pytest.mark.parametrize("lifetime", ["iteration", pytest.param("layer", marks=pytest.mark.slow)])
@ranks(2)
def test_an_iteration_that_ends_before_its_backward(lifetime: str) -> None:
    """The backward computes forwards again that were seen in an iteration which is over."""
    import tiny_gpt

    settings = FULL
    names = ["zeroed between forward and backward", "critic steps between forward and backward"]
    _compare(tiny_gpt.Case(skew=4, settings=tuple(settings.items())), names, lifetime=lifetime)


def _run_twice(run: Any, case: Any, step: int) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of one iteration, two times in a row, as Megatron's rerun state machine has it."""
    import tiny_gpt

    both = []
    for _ in range(2):
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        loss = tiny_gpt.run(case, run.chunks, step, num_microbatches=case.accumulate)
        both.append((loss, {n: p.main_grad.clone() for n, p in tiny_gpt._named(run.chunks)}))
    return both


@pytest.mark.parametrize(
    ("lifetime", "late"),
    [
        ("iteration", 0),
        ("layer", 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("iteration", 4), ("layer", 0))),
    ],
)
@ranks(2)
def test_a_repeated_iteration_is_bitwise_the_same(lifetime: str, late: int) -> None:
    """Also the first one, and those where other experts have just become hot, for which a new plan would differ."""
    import tiny_gpt

    case = tiny_gpt.Case(accumulate=2, skew=4, settings=(("moe_router_topk", 3),))
    tiny_gpt.initialize(case)
    computed = torch.zeros(1)
    hook = tiny_gpt.counting_hook(
        tiny_gpt.fssdp_hook(lifetime=lifetime, late_replicas=late), computed
    )
    run = tiny_gpt.train(case, steps=0, hook=hook)
    in_replicas = []  # tokens, in each step
    for step in range(6):
        computed.zero_()
        (loss, grads), (loss_again, grads_again) = _run_twice(run, case, step)
        assert loss == loss_again, step
        assert all(torch.equal(grads[n], grads_again[n]) for n in grads), step
        dist.all_reduce(computed)
        in_replicas.append(int(computed))
        assert run.optimizer.step()[0]
        tiny_gpt.move_skew_sometimes(run.chunks, step)
    # other experts are hot in steps 0 and 1, 2 and 3, 4 and 5; late replicas serve them at once
    assert min(in_replicas[0 if late else 1 :: 1 if late else 2]) > 0, in_replicas
