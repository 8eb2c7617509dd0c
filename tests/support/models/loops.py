"""Training loops as frameworks and researchers write them around Megatron's model, DDP and optimizer.

Each pattern trains a `Loop` for a few steps and returns its losses. None knows of FSSDP.
Sources: slime, NeMo-RL, verl and ms-swift (dynamic batches, several schedule calls per step, offloading between steps,
log-probability passes, reference weights copied in and out), sharpness-aware minimization, rollbacks after bad batches.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_model_config

import megatron_hecate

STEPS = 4


class Loop(tiny_gpt.Model):
    """Further operations that loops are made of."""

    @property
    def buffers(self) -> list[Any]:
        return [b for chunk in self.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]

    def reports(self, step: int, forward_step: Callable, microbatches: int) -> list[float]:
        """One call of Megatron's schedule with a ``forward_step`` of the loop's own; returns the losses."""
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([tiny_gpt.batch(self.case, step, i) for i in range(microbatches)]),
            model=self.chunks[0],
            num_microbatches=microbatches,
            seq_length=self.case.seq,
            micro_batch_size=self.case.micro_batch,
            forward_only=False,
        )
        return [float(report["lm loss"][0]) for report in reports]

    def scale(self, factor: float, how: str = "data") -> None:
        """Change all weights in place; only where ``how`` is "in place" do tensors' version counters show it."""
        with torch.no_grad():
            if how == "in place":
                for p in self.parameters:
                    p.mul_(factor)
            elif how == "buffer" and any(b.param_data is not None for b in self.buffers):
                for buffer in self.buffers:
                    buffer.param_data.mul_(factor)
            elif how == "foreach":
                torch._foreach_mul_([p.data for p in self.parameters], factor)
            else:
                for p in self.parameters:
                    p.data.mul_(factor)

    @contextlib.contextmanager
    def scaled(self, factor: float, how: str = "data") -> Iterator[None]:
        """Other weights in the block, the same ones after it."""
        kept = [p.detach().clone() for p in self.parameters]
        self.scale(factor, how)
        yield
        with torch.no_grad():
            for p, weight in zip(self.parameters, kept, strict=True):
                p.data.copy_(weight)


def set_calculator(case: tiny_gpt.Case, microbatches: int | None) -> None:
    """Let Megatron's calculator announce so many microbatches, or be absent."""
    calculator.unset_num_microbatches_calculator()
    if microbatches is not None:
        tiny_gpt.set_num_microbatches(case, microbatches)


Pattern = Callable[[Loop], list[float]]
Body = Callable[[Loop, int], list[float]]


def steps_of(
    body: Body, *, count: int = STEPS, announced: int | None = None, finishes: bool = False
) -> Pattern:
    """A loop of ``count`` steps: it zeroes gradients, runs ``body``, which returns losses, and updates weights.

    Args:
        body: called with the loop and the step.
        count: steps.
        announced: what Megatron's calculator says, if anything.
        finishes: whether gradients are reduced after ``body``, which no schedule has done.
    """

    def pattern(loop: Loop) -> list[float]:
        losses = []
        set_calculator(loop.case, announced)
        for step in range(count):
            loop.zero()
            losses += body(loop, step)
            if finishes:
                loop.finish()
            loop.update()
        return losses

    return pattern


def by_hand(body: Body) -> Pattern:
    """A loop without a schedule."""
    return steps_of(body, finishes=True)


def call_and(act: Callable[[Loop, int], list[float] | None]) -> Pattern:
    """One schedule call per step, and behind each update ``act(loop, step)``, which may return further losses."""

    def pattern(loop: Loop) -> list[float]:
        losses = []
        set_calculator(loop.case, 2)
        for step in range(STEPS):
            loop.zero()
            losses.append(loop.call(step, 2))
            loop.update()
            losses += act(loop, step) or []
        return losses

    return pattern


def calls_of(*counts: int) -> Body:
    """One schedule call per step, of so many microbatches."""
    return lambda loop, step: [loop.call(step, counts[step])]


def log_probabilities_in_train_mode(loop: Loop, step: int) -> None:
    with torch.no_grad():
        loop.call(100 + step, 3, forward_only=True)


def call_and_log_probabilities(loop: Loop, step: int) -> list[float]:
    loss = loop.call(step, 2)
    log_probabilities_in_train_mode(loop, step)
    return [loss]


def forward_without_backward(loop: Loop, step: int) -> None:
    """A log-probability pass that forgot ``no_grad``."""
    loop.forward(100 + step, 0)


def load_own_weights(loop: Loop) -> None:
    module = loop.chunks[0].module
    module.load_state_dict(copy.deepcopy(module.state_dict()))


def backward(loop: Loop, step: int, index: int, *, scale: float = 1.0) -> float:
    """One microbatch outside of any schedule."""
    loss = loop.forward(step, index) * scale
    loss.backward()
    return float(loss)


def sharpness_aware_by_microbatch(loop: Loop, step: int) -> list[float]:
    """Each microbatch at weights of its own, and back; gradients add up, no reduction and no zeroing in between."""
    losses = []
    with loop.chunks[0].no_sync():
        for index in range(3):
            with loop.scaled(1 + 0.05 * index, "buffer"):
                losses.append(backward(loop, step, index))
    loop.chunks[0].start_grad_sync()
    return losses


def calls_at_other_weights(loop: Loop, step: int) -> list[float]:
    """Several schedule calls add up gradients, each at weights of its own; one reduction at the end."""
    losses = []
    with _streaming(loop):
        for index in range(2):
            with loop.scaled(1 + 0.05 * index), loop.chunks[0].no_sync():
                losses.append(loop.call(10 * step + index, 2))
    loop.chunks[0].start_grad_sync()
    return losses


def forwards_then_backwards(loop: Loop, step: int) -> list[float]:
    """Two forwards are in flight, as in pipelines, without a schedule."""
    losses = [loop.forward(step, 0), loop.forward(step, 1)]
    with loop.chunks[0].no_sync():
        losses[0].backward()
    losses[1].backward()
    return [float(loss) for loss in losses]


def forgotten_forward_at_other_weights(loop: Loop, step: int) -> list[float]:
    """A forward with gradients but without backward, then other weights, without any call that says so."""
    with loop.scaled(0.9):
        loop.forward(100 + step, 0)
    return [backward(loop, step, 0)]


def roll_back(loop: Loop) -> list[float]:
    """Every second batch is bad: its gradients are dropped, reduced by a schedule or not, and weights shrink."""
    losses = []
    set_calculator(loop.case, None)
    for step in range(2 * STEPS):
        loop.zero()
        if step % 2 == 0:
            losses.append(loop.call(step, 2))
            loop.update()
            continue
        if step % 4 == 1:
            losses.append(loop.call(step, 2))
        else:
            with loop.chunks[0].no_sync():
                losses.append(backward(loop, step, 0))
        loop.scale(0.97)
    return losses


def average_for_evaluation(loop: Loop, step: int) -> list[float]:
    """An exponential average of the weights is swapped in and out, and trains one batch on the way."""
    with loop.scaled(0.99, "foreach"):
        loop.evaluate(step)
        loop.zero()
        return [loop.call(50 + step, 1)]


def several_calls(loop: Loop, step: int) -> list[float]:
    """Several schedule calls, each with its reduction, before one step."""
    return [loop.call(10 * step + call, 1) for call in range(3)]


@contextlib.contextmanager
def _streaming(loop: Loop) -> Iterator[None]:
    """NeMo-RL: hooks of the schedule are set to nothing in the block."""
    config = get_model_config(loop.chunks[0])
    hooks = (config.no_sync_func, config.finalize_model_grads_func)
    config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
    yield
    config.no_sync_func, config.finalize_model_grads_func = hooks


def own_loop(loop: Loop, step: int, *, quiet: str = "none", says: bool = False) -> list[float]:
    """No schedule. ``quiet``: which backwards run in ``no_sync``: none, all, or all but the last.

    ``says``: weights change only in the optimizer's step, as the loop says.
    """
    losses = []
    if says:
        megatron_hecate.iteration_begins(loop.chunks)
        loop.zero()
    for index in range(3):
        is_quiet = quiet == "all" or (quiet == "but last" and index < 2)
        with loop.chunks[0].no_sync() if is_quiet else contextlib.nullcontext():
            losses.append(backward(loop, step, index, scale=1 / 3))
    if quiet == "all":
        loop.chunks[0].start_grad_sync()
    finalize_model_grads(loop.chunks, None)
    return losses


def gradients_of_a_call_scaled_by_hand(loop: Loop, step: int) -> list[float]:
    with _streaming(loop), loop.chunks[0].no_sync():
        loss = loop.call(50 + step, 2)
    for p in loop.parameters:
        p.main_grad.mul_(0.1)
    return [loss, loop.call(step, 2)]


def weights_change_in_forward_step(
    loop: Loop, step: int, *, how: str, says: bool = False
) -> list[float]:
    """A schedule's ``forward_step`` changes all weights before each microbatch."""
    factors = iter([1.05, 1 / 1.05] * 2)

    def forward_step(data: Any, model: Any, **_: Any) -> Any:
        loop.scale(next(factors), how)
        if says:
            megatron_hecate.weights_changed(loop.chunks)
        return tiny_gpt.forward_step(data, model, case=loop.case)

    return loop.reports(step, forward_step, 4)


def some_in_eval_mode(loop: Loop, step: int) -> list[float]:
    """Every second microbatch, also the last one, trains in ``eval()``, where FSSDP has no replicas."""
    losses = []
    for index in range(4):
        loop.chunks[0].train(index % 2 == 0)
        with loop.chunks[0].no_sync() if index < 3 else contextlib.nullcontext():
            losses.append(backward(loop, step, index))
    loop.chunks[0].train()
    return losses


def zero_before_backward(loop: Loop, step: int) -> list[float]:
    """As loops around plain torch do it: forward, zero the gradients, backward, step."""
    loss = loop.forward(step, 0)
    loop.zero()
    loss.backward()
    return [float(loss)]


def beside_a_critic(loop: Loop, *, forwards: int) -> list[float]:
    """After the first of so many forwards that are in flight together, another model has a whole step."""
    critic = Loop(loop.case, loop.hook)

    def body(loop: Loop, step: int) -> list[float]:
        loss = loop.forward(step, 0)
        critic.zero()
        critic_loss = critic.call(step, 2)
        critic.update()
        for index in range(1, forwards):
            loss = loss + loop.forward(step, index)
        loss.backward()
        return [critic_loss, float(loss)]

    return by_hand(body)(loop)


def load_midway(loop: Loop, step: int) -> list[float]:
    losses = []
    for index in range(3):
        with loop.chunks[0].no_sync() if index < 2 else contextlib.nullcontext():
            losses.append(backward(loop, step, index, scale=1 / 3))
        if index == 0:
            load_own_weights(loop)
    return losses


class BadBatchError(Exception):
    pass


def break_off(loop: Loop) -> list[float]:
    """In every second step the second microbatch raises; the loop drops the step and goes on."""
    losses = []
    set_calculator(loop.case, 3)
    for step in range(2 * STEPS):
        loop.zero()
        microbatches = itertools.count()

        def forward_step(
            data: Any,
            model: Any,
            *,
            microbatches: Iterator[int] = microbatches,
            is_bad: bool = step % 2 == 1,
            **_: Any,
        ) -> Any:
            if next(microbatches) == 1 and is_bad:
                raise BadBatchError
            return tiny_gpt.forward_step(data, model, case=loop.case)

        try:
            losses += loop.reports(step, forward_step, 3)
        except BadBatchError:
            continue
        loop.update()
    return losses


def two_models(loop: Loop) -> list[float]:
    """Policy and critic in one process, and the critic steps before the policy does."""
    models = [loop, Loop(loop.case, loop.hook)]
    losses = []
    for step in range(STEPS):
        for model in models:
            model.zero()
            losses.append(model.call(step, 2))
        for model in reversed(models):
            model.update()
    return losses


def two_models_with_one_config(loop: Loop) -> list[float]:
    """Each trains in two schedule calls per step, one of them at other weights."""
    config = get_model_config(loop.chunks[0])
    models = [loop, Loop(loop.case, loop.hook, config)]
    losses = []
    for step in range(STEPS):
        for model in models:
            config.grad_scale_func = model.optimizer.scale_loss
            model.zero()
            finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
            with model.scaled(1.3):
                losses.append(model.call(10 * step, 2))
            config.finalize_model_grads_func = finalize
            losses.append(model.call(10 * step + 1, 2))
            model.update()
    return losses


def without_ddp(loop: Loop) -> list[float]:
    """A bare module, with an optimizer that is no ``torch.optim.Optimizer``: the loop says where iterations begin."""
    (module,), _ = tiny_gpt.build(loop.case, loop.hook)
    loop.chunks = [module]
    losses = []
    for step in range(STEPS):
        megatron_hecate.iteration_begins(module)
        module.zero_grad()
        losses += [backward(loop, step, index, scale=0.5) for index in range(2)]
        with torch.no_grad():
            for p in module.parameters():
                if p.grad is not None:
                    p.data.sub_(p.grad, alpha=0.05)
    return losses


def several_backwards(loop: Loop, step: int, *, how: str) -> list[float]:
    """Two losses of one forward, whose graph is kept."""
    data = tiny_gpt.batch(loop.case, step, 0)
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    mask = torch.ones(1, 1, loop.case.seq, loop.case.seq, dtype=torch.bool).triu(1)
    positions = torch.arange(loop.case.seq).expand(loop.case.micro_batch, -1)
    logits = loop.chunks[0](tokens, positions, mask).float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    second = 0.01 * logits.logsumexp(-1).square().mean()
    losses = [float(loss), float(second)]
    if how == "gradient of the embedding first":
        (weight,) = [p for n, p in loop.chunks[0].named_parameters() if "word_embeddings" in n]
        (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
        losses.append(float(grad.norm()))
    elif how != "retained":
        with loop.chunks[0].no_sync() if how == "no_sync" else contextlib.nullcontext():
            loss.backward(retain_graph=True)
        second.backward(retain_graph=how == "three")
        if how != "three":
            return losses
    (loss + second).backward(retain_graph=how == "retained")
    return losses


# Several backwards through one forward.
REPEATED = {
    f"backwards, {how}": by_hand(partial(several_backwards, how=how))
    for how in ("two", "three", "no_sync", "retained", "gradient of the embedding first")
}
PATTERNS: dict[str, Pattern] = {
    "microbatches vary, no calculator": steps_of(calls_of(1, 3, 2, 4)),
    "calculator says no divisor": steps_of(calls_of(3, 3, 3, 3), announced=2),
    "log-probabilities before the step": steps_of(call_and_log_probabilities, announced=2),
    "forward without backward": call_and(forward_without_backward),
    "sharpness-aware by microbatch": by_hand(sharpness_aware_by_microbatch),
    "calls at other weights, one reduction": by_hand(calls_at_other_weights),
    "two forwards, then two backwards": by_hand(forwards_then_backwards),
    "forgotten forward at other weights": by_hand(forgotten_forward_at_other_weights),
    "roll back": roll_back,
    "average swapped in": call_and(average_for_evaluation),
    "several calls per step": steps_of(several_calls, announced=8),
    "own loop": steps_of(own_loop),
    "own loop, no_sync but last": steps_of(partial(own_loop, quiet="but last")),
    "own loop, no_sync for all": steps_of(partial(own_loop, quiet="all")),
    "weights loaded between microbatches": by_hand(load_midway),
    "steps broken off": break_off,
    "microbatches in eval mode": by_hand(some_in_eval_mode),
    "weights written in forward_step": steps_of(
        partial(weights_change_in_forward_step, how="in place")
    ),
    "gradients of a call scaled by hand": steps_of(gradients_of_a_call_scaled_by_hand),
    "zeroed between forward and backward": by_hand(zero_before_backward),
    "critic steps between forward and backward": partial(beside_a_critic, forwards=1),
    "two models, interleaved": two_models,
    "two models with one configuration": two_models_with_one_config,
    "without DDP, own optimizer": without_ddp,
    **REPEATED,
}
# Tensors' version counters do not show these: the loop says so.
TOLD = {
    "weights written in forward_step, told": steps_of(
        partial(weights_change_in_forward_step, how="data", says=True)
    ),
    "own loop that says where iterations begin": steps_of(partial(own_loop, says=True)),
}
# Refused with the other lifetimes.
ONLY_WITH_LIFETIME_LAYER = {
    "critic steps between forwards in flight": partial(beside_a_critic, forwards=2)
}


def train_pattern(case: tiny_gpt.Case, pattern: Pattern, hook: Any) -> tuple:
    """Losses, parameters, and the tokens that replicas computed on all ranks."""
    computed = torch.zeros(1)
    loop = Loop(case, hook and tiny_gpt.counting_hook(hook, computed))
    losses = pattern(loop)
    loop.gather()
    dist.all_reduce(computed)
    params = {n: p.detach().clone() for n, p in tiny_gpt.named_parameters(loop.chunks)}
    return losses, params, int(computed)


def assert_equal(stock: tuple, ours: tuple, name: str) -> None:
    """Losses and parameters agree to 1e-5, and replicas have computed."""
    losses, params, _ = stock
    our_losses, our_params, computed = ours
    assert computed > 0, f"{name}: no replica computed anything, so nothing was tested"
    loss = max(abs(a - b) / abs(a) for a, b in zip(losses, our_losses, strict=True))
    param = max(float((params[n].double() - our_params[n].double()).abs().max()) for n in params)
    assert loss <= 1e-5 and param <= 1e-5, (name, loss, param)
