"""Training loops as frameworks and researchers write them around Megatron's model, DDP and optimizer.

Each pattern is a function of a `Loop` that trains a few steps and returns its losses. None knows of FSSDP.
Sources: slime, NeMo-RL, verl and ms-swift (dynamic batches, several schedule calls per step, offloading between steps,
log-probability passes, reference weights copied in and out), sharpness-aware minimization, rollbacks after bad batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tiny_gpt
import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_model_config

import megatron_hecate

STEPS = 4


@dataclasses.dataclass
class Loop:
    """A model with its optimizer, and the operations that loops are made of."""

    case: tiny_gpt.Case
    hook: Callable[[list], list] | None
    config: Any = None  # of another model, where two share it
    chunks: list = dataclasses.field(init=False)
    optimizer: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        chunks, config = tiny_gpt.build(self.case, self.hook, self.config)
        self.chunks, self.optimizer = tiny_gpt.wrap(self.case, chunks, config)

    @property
    def params(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    @property
    def buffers(self) -> list[Any]:
        return [b for chunk in self.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]

    def zero(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def call(self, step: int, microbatches: int, *, forward_only: bool = False) -> float:
        """One call of Megatron's schedule; returns the mean loss."""
        return tiny_gpt.run(
            self.case, self.chunks, step, num_microbatches=microbatches, forward_only=forward_only
        )

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

    def forward(self, step: int, index: int) -> torch.Tensor:
        """One forward outside of any schedule; returns the mean loss of this rank."""
        data = iter([tiny_gpt.batch(self.case, step, index)])
        output, loss_func = tiny_gpt.forward_step(data, self.chunks[0], case=self.case)
        loss, count, _ = loss_func(output)
        return loss / count

    def finish(self) -> None:
        for chunk in self.chunks:
            chunk.finish_grad_sync()

    def update(self) -> None:
        assert self.optimizer.step()[0]

    def evaluate(self, step: int) -> None:
        with tiny_gpt.evaluating(self.chunks):
            self.call(100 + step, 2, forward_only=True)

    def scale(self, factor: float, how: str = "data") -> None:
        """Change all weights in place; only where ``how`` is "in place" do tensors' version counters show it."""
        with torch.no_grad():
            if how == "in place":
                for p in self.params:
                    p.mul_(factor)
            elif how == "buffer" and any(b.param_data is not None for b in self.buffers):
                for buffer in self.buffers:
                    buffer.param_data.mul_(factor)
            elif how == "foreach":
                torch._foreach_mul_([p.data for p in self.params], factor)
            else:
                for p in self.params:
                    p.data.mul_(factor)

    @contextlib.contextmanager
    def scaled(self, factor: float, how: str = "data") -> Iterator[None]:
        """Other weights in the block, the same ones after it."""
        kept = [p.detach().clone() for p in self.params]
        self.scale(factor, how)
        yield
        with torch.no_grad():
            for p, weight in zip(self.params, kept, strict=True):
                p.data.copy_(weight)


def set_calculator(case: tiny_gpt.Case, microbatches: int | None) -> None:
    """Let Megatron's calculator announce so many microbatches, or be absent."""
    calculator.unset_num_microbatches_calculator()
    if microbatches is not None:
        tiny_gpt.set_num_microbatches(case, microbatches)


def steps(
    loop: Loop,
    *,
    counts: tuple[int, ...] = (2, 2, 2, 2),
    announced: int | None = 2,
    between: Callable[[Loop, int], None] | None = None,
    before_update: Callable[[Loop, int], None] | None = None,
) -> list[float]:
    """The common loop: one schedule call and one optimizer step per iteration."""
    losses = []
    set_calculator(loop.case, announced)
    for step, count in enumerate(counts):
        loop.zero()
        losses.append(loop.call(step, count))
        if before_update is not None:
            before_update(loop, step)
        loop.update()
        if between is not None:
            between(loop, step)
    return losses


# Between two steps.


def evaluate(loop: Loop, step: int) -> None:
    loop.evaluate(step)


def log_probabilities_in_train_mode(loop: Loop, step: int) -> None:
    with torch.no_grad():
        loop.call(100 + step, 3, forward_only=True)


def forward_without_backward(loop: Loop, step: int) -> None:
    """A log-probability pass that forgot ``no_grad``."""
    loop.forward(100 + step, 0)


def empty_storages(loop: Loop, _: int) -> None:
    """verl, ms-swift: storages of DDP's buffers are emptied for the rollout, and filled again."""
    kept = []
    for buffer in loop.buffers:
        data = None if buffer.param_data is None else buffer.param_data.clone()
        kept.append((buffer, data, buffer.grad_data.untyped_storage().size()))
        buffer.grad_data.untyped_storage().resize_(0)
        if data is not None:
            buffer.param_data.untyped_storage().resize_(0)
    for buffer, data, grad_bytes in kept:
        buffer.grad_data.untyped_storage().resize_(grad_bytes)
        buffer.grad_data.zero_()
        if data is not None:
            buffer.param_data.untyped_storage().resize_(data.untyped_storage().size())
            buffer.param_data.copy_(data)


def replace_param_data(loop: Loop, _: int) -> None:
    for p in loop.params:
        old = p.data
        p.data = old.clone()
        old.fill_(float("nan"))


def load_own_weights(loop: Loop, _: int) -> None:
    state = {
        k: v.clone() if torch.is_tensor(v) else v
        for k, v in loop.chunks[0].module.state_dict().items()
    }
    loop.chunks[0].module.load_state_dict(state)


def swap_in_reference(loop: Loop, step: int) -> None:
    """slime: weights of the reference model are copied into the same parameters and back."""
    with loop.scaled(0.5):
        loop.evaluate(step)


# Whole loops.


def sharpness_aware(loop: Loop, *, announced: int | None = 2, how: str = "data") -> list[float]:
    """Gradient, weights changed in place, gradient there, weights changed back, step."""
    losses = []
    set_calculator(loop.case, announced)
    for step in range(STEPS):
        loop.zero()
        losses.append(loop.call(step, 2))
        with loop.scaled(1.05, how):
            loop.zero()
            losses.append(loop.call(step, 2))
        loop.update()
    return losses


def sharpness_aware_by_microbatch(loop: Loop, *, how: str = "data") -> list[float]:
    """Each microbatch at weights of its own; gradients add up, no reduction and no zeroing in between."""
    losses = []
    for step in range(STEPS):
        loop.zero()
        with loop.chunks[0].no_sync():
            for index in range(3):
                with loop.scaled(1 + 0.05 * index, how):
                    loss = loop.forward(step, index)
                    loss.backward()
                losses.append(float(loss))
        loop.chunks[0].start_grad_sync()
        loop.finish()
        loop.update()
    return losses


def weights_change_before_last(loop: Loop) -> list[float]:
    """The last microbatch runs outside of ``no_sync``, at other weights than those before."""
    losses = []
    for step in range(STEPS):
        loop.zero()
        with loop.chunks[0].no_sync():
            loss = loop.forward(step, 0)
            loss.backward()
        with loop.scaled(1.05):
            last = loop.forward(step, 1)
            last.backward()
        losses += [float(loss), float(last)]
        loop.finish()
        loop.update()
    return losses


def calls_at_other_weights(loop: Loop) -> list[float]:
    """Several schedule calls add up gradients, each at weights of its own; one reduction at the end."""
    config = get_model_config(loop.chunks[0])
    losses = []
    for step in range(STEPS):
        loop.zero()
        finalize = config.finalize_model_grads_func
        config.finalize_model_grads_func = None
        for index in range(2):
            with loop.scaled(1 + 0.05 * index), loop.chunks[0].no_sync():
                losses.append(loop.call(10 * step + index, 2))
        config.finalize_model_grads_func = finalize
        loop.chunks[0].start_grad_sync()
        loop.finish()
        loop.update()
    return losses


def forwards_then_backwards(loop: Loop) -> list[float]:
    """Two forwards are in flight, as in pipelines, without a schedule."""
    losses = []
    for step in range(STEPS):
        loop.zero()
        both = [loop.forward(step, 0), loop.forward(step, 1)]
        with loop.chunks[0].no_sync():
            both[0].backward()
        both[1].backward()
        losses += map(float, both)
        loop.finish()
        loop.update()
    return losses


def forgotten_forward_at_other_weights(loop: Loop) -> list[float]:
    """A forward with gradients but without backward, then other weights, without any call that says so."""
    losses = []
    for step in range(STEPS):
        loop.zero()
        with loop.scaled(0.9):
            loop.forward(100 + step, 0)
        loss = loop.forward(step, 0)
        loss.backward()
        losses.append(float(loss))
        loop.finish()
        loop.update()
    return losses


def roll_back(loop: Loop, *, announced: int | None = None) -> list[float]:
    """Every second batch is bad: its gradients are dropped and weights shrink."""
    losses = []
    set_calculator(loop.case, announced)
    for step in range(2 * STEPS):
        loop.zero()
        losses.append(loop.call(step, 2))
        if step % 2:
            loop.scale(0.97)
        else:
            loop.update()
    return losses


def roll_back_without_reduction(loop: Loop) -> list[float]:
    losses = []
    for step in range(2 * STEPS):
        loop.zero()
        bad = step % 2 == 1
        with loop.chunks[0].no_sync() if bad else contextlib.nullcontext():
            loss = loop.forward(step, 0)
            loss.backward()
        losses.append(float(loss))
        if bad:
            loop.scale(0.97)
            continue
        loop.finish()
        loop.update()
    return losses


def average_for_evaluation(loop: Loop) -> list[float]:
    """An exponential average of the weights is swapped in and out, and trains one batch on the way."""
    losses = []
    for step in range(STEPS):
        loop.zero()
        losses.append(loop.call(step, 2))
        loop.update()
        with loop.scaled(0.99, "foreach"):
            loop.evaluate(step)
            loop.zero()
            losses.append(loop.call(50 + step, 1))
    return losses


def skip_steps(loop: Loop, *, announced: int | None = 2) -> list[float]:
    """slime: with NaN in the gradients no optimizer steps."""
    losses = []
    set_calculator(loop.case, announced)
    for step in range(STEPS + 1):
        loop.zero()
        losses.append(loop.call(step, 2))
        if step not in (1, 2):
            loop.update()
        loop.zero()
    return losses


def several_calls(loop: Loop, *, announced: int | None = None) -> list[float]:
    """Several schedule calls, each with its reduction, before one step."""
    losses = []
    set_calculator(loop.case, announced)
    for step in range(STEPS):
        loop.zero()
        losses += [loop.call(10 * step + call, 1) for call in range(3)]
        loop.update()
    return losses


def streaming(loop: Loop, *, announced: int | None = None) -> list[float]:
    """NeMo-RL: hooks of the schedule are set to nothing, every call runs in ``no_sync``, one reduction at the end."""
    config = get_model_config(loop.chunks[0])
    losses = []
    set_calculator(loop.case, announced)
    for step in range(STEPS):
        loop.zero()
        saved = (config.no_sync_func, config.finalize_model_grads_func)
        config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
        for call in range(3):
            with loop.chunks[0].no_sync():
                losses.append(loop.call(10 * step + call, 2))
        config.no_sync_func, config.finalize_model_grads_func = saved
        loop.chunks[0].start_grad_sync()
        finalize_model_grads(loop.chunks, None)
        loop.update()
    return losses


def own_loop(loop: Loop, *, quiet: str = "none", finish: bool = True) -> list[float]:
    """No schedule at all. ``quiet``: which backwards run in ``no_sync``: none, all, or all but the last."""
    losses = []
    for step in range(STEPS):
        loop.zero()
        for index in range(3):
            in_no_sync = quiet == "all" or (quiet == "but last" and index < 2)
            with loop.chunks[0].no_sync() if in_no_sync else contextlib.nullcontext():
                loss = loop.forward(step, index) / 3
                loss.backward()
            losses.append(float(loss))
        if finish:
            if quiet == "all":
                loop.chunks[0].start_grad_sync()
            finalize_model_grads(loop.chunks, None)
        loop.update()
    return losses


def own_loop_that_says(loop: Loop) -> list[float]:
    """No schedule; weights change only in the optimizer's step, as the loop says."""
    losses = []
    for step in range(STEPS):
        megatron_hecate.iteration_begins(loop.chunks)
        loop.zero()
        for index in range(3):
            loss = loop.forward(step, index) / 3
            loss.backward()
            losses.append(float(loss))
        finalize_model_grads(loop.chunks, None)
        loop.update()
    return losses


def gradients_scaled_by_hand(loop: Loop, *, factor: float, calls: bool = False) -> list[float]:
    """``main_grad`` is scaled, or zeroed, inside ``no_sync`` and right after it; ``calls``: of a schedule."""
    config = get_model_config(loop.chunks[0])
    losses = []

    def add_gradients(step: int) -> None:
        if calls:
            losses.append(loop.call(step, 2))
            return
        loss = loop.forward(step, 0)
        loss.backward()
        losses.append(float(loss))

    for step in range(STEPS):
        loop.zero()
        saved = (config.no_sync_func, config.finalize_model_grads_func)
        config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
        with loop.chunks[0].no_sync():
            add_gradients(50 + step)
            if not calls:
                for p in loop.params:
                    p.main_grad.mul_(factor)
                add_gradients(80 + step)
        config.no_sync_func, config.finalize_model_grads_func = saved
        for p in loop.params:
            p.main_grad.mul_(factor)
        add_gradients(step)
        if not calls:
            loop.finish()
        loop.update()
    return losses


def weights_change_in_forward_step(loop: Loop, *, how: str, says: bool = False) -> list[float]:
    """A schedule's ``forward_step`` changes all weights before each microbatch."""
    losses = []
    for step in range(STEPS):
        loop.zero()
        factors = iter([1.05, 1 / 1.05] * 2)

        def forward_step(
            data: Any, model: Any, *, factors: Iterator[float] = factors, **_: Any
        ) -> Any:
            loop.scale(next(factors), how)
            if says:
                megatron_hecate.weights_changed(loop.chunks)
            return tiny_gpt.forward_step(data, model, case=loop.case)

        losses += loop.reports(step, forward_step, 4)
        loop.update()
    return losses


def some_in_eval_mode(loop: Loop) -> list[float]:
    """Every second microbatch, also the last one, trains in ``eval()``, where FSSDP has no replicas."""
    losses = []
    for step in range(STEPS):
        loop.zero()
        for index in range(4):
            loop.chunks[0].train(index % 2 == 0)
            with loop.chunks[0].no_sync() if index < 3 else contextlib.nullcontext():
                loss = loop.forward(step, index)
                loss.backward()
            losses.append(float(loss))
        loop.finish()
        loop.update()
    loop.chunks[0].train()
    return losses


def zero_before_backward(loop: Loop) -> list[float]:
    """As loops around plain torch do it: forward, zero the gradients, backward, step."""
    losses = []
    for step in range(STEPS):
        loss = loop.forward(step, 0)
        loop.zero()
        loss.backward()
        losses.append(float(loss))
        loop.finish()
        loop.update()
    return losses


def critic_steps_before_backward(loop: Loop) -> list[float]:
    """Another model has a whole step between a forward and its backward."""
    critic = Loop(loop.case, loop.hook)
    losses = []
    for step in range(STEPS):
        loop.zero()
        loss = loop.forward(step, 0)
        critic.zero()
        losses.append(critic.call(step, 2))
        critic.update()
        loss.backward()
        losses.append(float(loss))
        loop.finish()
        loop.update()
    return losses


def critic_steps_between_forwards(loop: Loop) -> list[float]:
    """Two forwards are in flight, and another model has a whole step between them."""
    critic = Loop(loop.case, loop.hook)
    losses = []
    for step in range(STEPS):
        loop.zero()
        first = loop.forward(step, 0)
        critic.zero()
        losses.append(critic.call(step, 2))
        critic.update()
        loss = first + loop.forward(step, 1)
        loss.backward()
        losses.append(float(loss))
        loop.finish()
        loop.update()
    return losses


def load_midway(loop: Loop) -> list[float]:
    losses = []
    for step in range(STEPS):
        loop.zero()
        for index in range(3):
            with loop.chunks[0].no_sync() if index < 2 else contextlib.nullcontext():
                loss = loop.forward(step, index) / 3
                loss.backward()
            losses.append(float(loss))
            if index == 0:
                load_own_weights(loop, step)
        loop.finish()
        loop.update()
    return losses


class BadBatchError(Exception):
    pass


def break_off(loop: Loop, *, announced: int | None = 3) -> list[float]:
    """In every second step the second microbatch raises; the loop drops the step and goes on."""
    losses = []
    set_calculator(loop.case, announced)
    for step in range(2 * STEPS):
        loop.zero()
        seen = []

        def forward_step(
            data: Any, model: Any, *, seen: list = seen, is_bad: bool = step % 2 == 1, **_: Any
        ) -> Any:
            seen.append(None)
            if is_bad and len(seen) == 2:
                raise BadBatchError
            return tiny_gpt.forward_step(data, model, case=loop.case)

        try:
            losses += loop.reports(step, forward_step, 3)
        except BadBatchError:
            continue
        loop.update()
    return losses


def two_models(loop: Loop, *, interleaved: bool = False) -> list[float]:
    """Policy and critic in one process; ``interleaved``: the critic steps before the policy does."""
    both = [loop, Loop(loop.case, loop.hook)]
    losses = []
    for step in range(STEPS):
        for one in both:
            one.zero()
            losses.append(one.call(step, 2))
            if not interleaved:
                one.update()
        for one in reversed(both) if interleaved else ():
            one.update()
    return losses


def two_models_with_one_config(loop: Loop) -> list[float]:
    """Of one configuration object; each trains in two schedule calls per step, one of them at other weights."""
    config = get_model_config(loop.chunks[0])
    both = [loop, Loop(loop.case, loop.hook, config)]
    losses = []
    for step in range(STEPS):
        for one in both:
            config.grad_scale_func = one.optimizer.scale_loss
            one.zero()
            finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
            with one.scaled(1.3):
                losses.append(one.call(10 * step, 2))
            config.finalize_model_grads_func = finalize
            losses.append(one.call(10 * step + 1, 2))
            one.update()
    return losses


def without_ddp(
    loop: Loop, *, own_optimizer: bool = False, rolls_back: bool = False
) -> list[float]:
    """A bare module and a plain optimizer of torch, or one that is no ``torch.optim.Optimizer``."""
    (module,), _ = tiny_gpt.build(loop.case, loop.hook)
    loop.chunks = [module]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, foreach=False)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(2):
            loss = loop.forward(step, index) / 2
            loss.backward()
            losses.append(float(loss))
        if rolls_back and step % 2:
            loop.scale(0.9)
        elif own_optimizer:
            with torch.no_grad():
                for p in module.parameters():
                    if p.grad is not None:
                        p.data.sub_(p.grad, alpha=0.05)
        else:
            optimizer.step()
    return losses


PATTERNS: dict[str, Callable[[Loop], list[float]]] = {
    "as Megatron's own": steps,
    "microbatches vary, no calculator": partial(steps, counts=(1, 3, 2, 4), announced=None),
    "calculator says more": partial(steps, counts=(3, 3, 3, 3), announced=8),
    "calculator says one": partial(steps, counts=(3, 2, 4, 1), announced=1),
    "calculator says no divisor": partial(steps, counts=(3, 3, 3, 3), announced=2),
    "calculator is right, then not": partial(steps, counts=(4, 4, 3, 4), announced=4),
    "evaluation between steps": partial(steps, between=evaluate),
    "log-probabilities between steps": partial(steps, between=log_probabilities_in_train_mode),
    "log-probabilities before the step": partial(
        steps, before_update=log_probabilities_in_train_mode
    ),
    "forward without backward": partial(steps, between=forward_without_backward),
    "storages emptied between steps": partial(steps, between=empty_storages),
    "weights loaded between steps": partial(steps, between=load_own_weights),
    "reference weights swapped in": partial(steps, between=swap_in_reference),
    "sharpness-aware": sharpness_aware,
    "sharpness-aware, no calculator, foreach": partial(
        sharpness_aware, announced=None, how="foreach"
    ),
    "sharpness-aware, DDP's buffer": partial(sharpness_aware, announced=None, how="buffer"),
    "sharpness-aware by microbatch": sharpness_aware_by_microbatch,
    "sharpness-aware by microbatch, buffer": partial(sharpness_aware_by_microbatch, how="buffer"),
    "other weights for the last microbatch": weights_change_before_last,
    "calls at other weights, one reduction": calls_at_other_weights,
    "two forwards, then two backwards": forwards_then_backwards,
    "forgotten forward at other weights": forgotten_forward_at_other_weights,
    "roll back": roll_back,
    "roll back, calculator": partial(roll_back, announced=2),
    "roll back without reduction": roll_back_without_reduction,
    "average swapped in": average_for_evaluation,
    "skipped steps": skip_steps,
    "skipped steps, no calculator": partial(skip_steps, announced=None),
    "several calls per step": several_calls,
    "several calls per step, calculator": partial(several_calls, announced=8),
    "NeMo-RL's streaming": streaming,
    "NeMo-RL's streaming, calculator": partial(streaming, announced=2),
    "own loop": own_loop,
    "own loop, no_sync but last": partial(own_loop, quiet="but last"),
    "own loop, no_sync for all": partial(own_loop, quiet="all"),
    "weights loaded between microbatches": load_midway,
    "steps broken off": break_off,
    "steps broken off, no calculator": partial(break_off, announced=None),
    "two models": two_models,
    "microbatches in eval mode": some_in_eval_mode,
    "weights written in forward_step": partial(weights_change_in_forward_step, how="in place"),
    "gradients zeroed by hand": partial(gradients_scaled_by_hand, factor=0.0),
    "gradients scaled by hand": partial(gradients_scaled_by_hand, factor=0.1),
    "gradients of a call zeroed by hand": partial(gradients_scaled_by_hand, factor=0.0, calls=True),
    "gradients of a call scaled by hand": partial(gradients_scaled_by_hand, factor=0.1, calls=True),
    "zeroed between forward and backward": zero_before_backward,
    "critic steps between forward and backward": critic_steps_before_backward,
    "two models with one configuration": two_models_with_one_config,
    "two models, interleaved": partial(two_models, interleaved=True),
    "without DDP": without_ddp,
    "without DDP, rolled back": partial(without_ddp, rolls_back=True),
    "without DDP, own optimizer": partial(without_ddp, own_optimizer=True),
}
# Tensors' version counters do not show these: the loop says so.
TOLD = {
    "weights written in forward_step, told": partial(
        weights_change_in_forward_step, how="data", says=True
    ),
    "own loop that says where iterations begin": own_loop_that_says,
}
# Refused with the other lifetimes.
ONLY_WITH_LIFETIME_LAYER = {
    "critic steps between forwards in flight": critic_steps_between_forwards
}
# Patterns that stock Megatron does not allow with ``overlap_grad_reduce``: gradients are reduced several times.
NOT_WITH_OVERLAP = {
    "own loop",
    "forward without backward",
    "several calls per step",
    "several calls per step, calculator",
    "calls at other weights, one reduction",
    "two models with one configuration",
}
