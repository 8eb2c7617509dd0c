"""Training loops that are not Megatron's: equal to stock, or refused with the way out.

Oracle: stock Megatron in the same loop. If replicas outlived a change of the weights, or gradients
waited for a backward that never comes, losses and parameters would differ.
"""

from __future__ import annotations

from typing import Any

import loops
import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from layouts import BIAS, FULL, FUSED_WGRAD, MOE
from ranks import ranks


def _compare(case: Any, names: list[str], *settings: dict[str, Any]) -> None:
    """Train each loop with stock, and with FSSDP in all ``settings``."""
    for name in names:
        pattern = (loops.PATTERNS | loops.TOLD | loops.ONLY_WITH_LIFETIME_LAYER)[name]
        stock = loops.train_pattern(case, pattern, None)
        for config in settings or ({},):
            ours = loops.train_pattern(case, pattern, tiny_gpt.fssdp_hook(**config))
            loops.assert_equal(stock, ours, f"{name}, {config}")


# In ``make test``: one loop of each kind, some of them with overlap (True); a kind is a reason for which an iteration could
# be taken to begin or end at the wrong place, or replicas be used at weights that are no more.
KINDS = {
    False: [
        "calculator says no divisor",
        "forward without backward",
        "sharpness-aware by microbatch",
        "calls at other weights, one reduction",
        "two forwards, then two backwards",
        "roll back",
        "several calls per step",
        "own loop",
        "gradients of a call scaled by hand",
        "without DDP, own optimizer",
        "backwards, no_sync",
    ],
    True: [
        "microbatches vary, no calculator",
        "average swapped in",
        "own loop, no_sync but last",
        "weights loaded between microbatches",
        "steps broken off",
        "two models, interleaved",
        "weights written in forward_step",
    ],
}


@pytest.mark.parametrize("overlap", KINDS)
@ranks(2, timeout=300)
def test_loops_of_each_kind_equal_stock(overlap: bool) -> None:
    case = tiny_gpt.initialized(distributed_optimizer=True, overlap=overlap, skew=4)
    _compare(case, KINDS[overlap])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@ranks(2, timeout=300)
def test_loops_equal_stock_with_both_lifetimes(part: int) -> None:
    case = tiny_gpt.initialized(skew=4)
    _compare(case, list(loops.PATTERNS)[part::3], {}, dict(lifetime="layer"))


@pytest.mark.slow
@pytest.mark.parametrize("model", [BIAS, FUSED_WGRAD, MOE], ids=["biases", "fused", "recomputed"])
@ranks(2)
def test_several_backwards_of_other_gradients(model: dict[str, Any]) -> None:
    tiny_gpt.install_fused_wgrad()
    case = tiny_gpt.initialized(skew=4, settings=model)
    _compare(case, list(loops.REPEATED)[:2], {}, dict(transport="nvlink"))


@ranks(2)
def test_weights_written_in_forward_step() -> None:
    """In ways that show nowhere: the loop says so; of some experts only: other ranks may see none."""
    case = tiny_gpt.initialized(skew=4)
    _compare(case, list(loops.TOLD), {}, dict(lifetime="layer"))
    forward_step = tiny_gpt.forward_step
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
    weight = tiny_gpt.moe_layers(run.chunks)[-1].experts.local_experts[0].linear_fc1.weight
    calls: list[None] = []

    def write_and_step(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            with torch.no_grad():
                weight.mul_(1.1)
        return forward_step(*args, **kwargs)

    tiny_gpt.forward_step = write_and_step
    message = r"layer 2: 1 of 8 weights .* megatron_hecate.weights_changed\(model\)"
    with pytest.raises(RuntimeError, match=message):
        run.call(2, 2)


@ranks(2)
def test_steps_of_other_models_between_forwards_in_flight() -> None:
    """They may be steps of this model, as far as FSSDP knows: the error says so, and its way out is one."""
    case = tiny_gpt.initialized(skew=4)
    ((name, pattern),) = loops.ONLY_WITH_LIFETIME_LAYER.items()
    _compare(case, [name], dict(lifetime="layer"))
    said = r"layer 2: a backward needs .*lifetime iteration.* \w+ stepped, of this model or of another one, .*"
    with pytest.raises(RuntimeError, match=said + "or use --moe-fssdp-lifetime layer"):
        loops.train_pattern(case, pattern, tiny_gpt.fssdp_hook())


@ranks(2)
def test_an_iteration_that_ends_before_its_backward() -> None:
    """The backward computes forwards again that were seen in an iteration which is over."""
    case = tiny_gpt.initialized(skew=4, settings=FULL)
    _compare(case, ["zeroed between forward and backward"])
    _compare(case, ["critic steps between forward and backward"], dict(lifetime="layer"))


def _run_twice(run: Any, case: Any, step: int) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of one iteration, two times in a row, as Megatron's rerun state machine has it."""
    both = []
    for _ in range(2):
        run.zero()
        loss = run.call(step, case.accumulate)
        both.append(
            (loss, {n: p.main_grad.clone() for n, p in tiny_gpt.named_parameters(run.chunks)})
        )
    return both


@pytest.mark.parametrize(("lifetime", "late"), [("iteration", 0), ("layer", 4)])
@ranks(2)
def test_a_repeated_iteration_is_bitwise_the_same(lifetime: str, late: int) -> None:
    """Also the first one, and those where other experts have just become hot, for which a new plan would differ."""
    case = tiny_gpt.initialized(accumulate=2, skew=4, settings=dict(moe_router_topk=3))
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
