"""Code that is attached to single experts would miss the tokens of replicas: refused, whenever it is attached.

Oracle: literal messages; for Megatron's own loggers, the records of stock Megatron. Case by case: hand-made LoRA and
scaling, activation statistics, steering, pruning, `torch.nn.utils.parametrize`, experts of unequal kind or size.
"""

from __future__ import annotations

import copy
import functools
import os
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import ranks
from torch.nn import Module

Change = Callable[[Any], None]  # of one expert, Megatron's MLP


class _Same(Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


class _Around(Module):
    """A linear with an adapter around it."""

    def __init__(self, inner: Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class _Expert(Module):
    """As Megatron's ``MLP``: two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = torch.nn.Linear(2, 2)
        self.linear_fc2 = torch.nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(self.linear_fc1(tokens))


def _wrap_forward(expert: Any) -> None:
    """`functools.wraps` makes the function look like Megatron's own."""
    expert.forward = functools.wraps(expert.forward)(lambda *args: None)


def _bind_method(expert: Any) -> None:
    expert.forward = types.MethodType(type(expert).forward, expert)


def _observe(expert: Any) -> None:
    expert.register_forward_hook(lambda module, args, output: None)


def _observe_before(expert: Any) -> None:
    expert.linear_fc1.register_forward_pre_hook(lambda module, args: None)


def _observe_gradient(expert: Any) -> None:
    expert.linear_fc2.register_full_backward_hook(lambda module, inputs, outputs: None)


def _observe_gradient_before(expert: Any) -> None:
    expert.register_full_backward_pre_hook(lambda module, outputs: None)


def _parametrize(expert: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(expert.linear_fc1, "weight", _Same())


def _normalize(expert: Any) -> None:
    torch.nn.utils.weight_norm(expert.linear_fc1)


def _wrap_linear(expert: Any) -> None:
    expert.linear_fc1 = _Around(expert.linear_fc1)


def _subclass(expert: Any) -> None:
    expert.__class__ = type("Expert", (type(expert),), {})


def _compile(expert: Any) -> None:
    expert.compile(backend="eager")


ATTACHED: dict[Change, str] = {
    _wrap_forward: r"1 \(_Expert\) has a forward of .*test_expert_parts on the instance",
    _bind_method: r"1 \(_Expert\) has a forward of .*test_expert_parts on the instance",
    _observe: r"1 \(_Expert\) has a forward hook of .*test_expert_parts",
    _observe_before: r"1.linear_fc1 \(Linear\) has a forward pre-hook of .*test_expert_parts",
    _observe_gradient: r"1.linear_fc2 \(Linear\) has a backward hook of .*test_expert_parts",
    _observe_gradient_before: r"1 \(_Expert\) has a backward pre-hook of .*test_expert_parts",
    _parametrize: r"1.linear_fc1 has become a ParametrizedLinear",
    _normalize: r"1.linear_fc1 \(Linear\) has a forward pre-hook of torch.nn.utils.weight_norm",
    _wrap_linear: r"1.linear_fc1 has become a _Around",
    _subclass: r"1 has become a Expert",
    _compile: r"1 \(_Expert\) has a forward of ",
}


@pytest.mark.fast
@pytest.mark.parametrize("change", ATTACHED, ids=lambda change: change.__name__)
def test_code_on_one_expert_is_named(change: Change) -> None:
    from megatron_hecate.megatron.foreign_code import ExpertParts

    experts = torch.nn.ModuleList([_Expert(), _Expert()])
    parts = ExpertParts(experts)
    parts.check()
    change(experts[1])
    with pytest.raises(ValueError, match=rf"inside its experts {ATTACHED[change]}.*; remove it, "):
        parts.check()


# What is refused once FSSDP is on, and before.
LATER: dict[Change, tuple[str, str]] = {
    _observe: (r"local_experts.1 \(MLP\) has a forward hook",) * 2,
    _wrap_linear: (
        r"local_experts.1.linear_fc1 has become a _Around",
        r"expert 1 of this rank has linear_fc1.class=_Around, expert 0 has linear_fc1.class=Column",
    ),
}


def _on_rank_1(chunks: list, change: Change) -> list:
    """Change the second expert of rank 1 in the second layer: rank 0 sees nothing of it."""
    import tiny_gpt

    if torch.distributed.get_rank() == 1:
        change(tiny_gpt.moe_layers(chunks)[1].experts.local_experts[1])
    return chunks


@ranks(2)
def test_before_switch_on_after_it_and_later() -> None:
    """All ranks raise the same error, by the first step at the latest. Later, here on all ranks, one that notices raises
    where the next iteration begins, however often it is called."""
    import loops
    import tiny_gpt

    case = tiny_gpt.Case(skew=4)
    tiny_gpt.initialize(case)
    for change, (message, refusal) in LATER.items():
        chunks, _ = tiny_gpt.build(case)
        with pytest.raises(ValueError, match=f"layer 2: .*{refusal}"):
            tiny_gpt.fssdp_hook()(_on_rank_1(chunks, change))
        loop = loops.Loop(case, tiny_gpt.fssdp_hook())
        _on_rank_1(loop.chunks, change)
        cannot_run = r"FSSDP cannot run:\n  - layer {0}: .*" + message
        with pytest.raises(ValueError, match=cannot_run.format(2)) as error:
            loop.call(0, 1)
        assert str(error.value).endswith("(rank 1)"), error.value
        loop = loops.Loop(case, tiny_gpt.fssdp_hook())
        for step in range(2):
            loop.zero()
            loop.call(step, 1)
            loop.update()
        for layer in tiny_gpt.moe_layers(loop.chunks):
            change(layer.experts.local_experts[1])
        loop.zero()
        for _ in range(2):
            with pytest.raises(ValueError, match=cannot_run.format(1)):
                loop.call(2, 1)


@ranks(2)
def test_hooks_that_are_removed_in_time_or_attached_elsewhere() -> None:
    """They train as stock."""
    import loops
    import tiny_gpt

    case = tiny_gpt.Case(skew=4)
    tiny_gpt.initialize(case)

    def train(hook: Callable | None) -> tuple[list[float], list[int]]:
        loop = loops.Loop(case, hook)
        seen: list[int] = []
        layers = tiny_gpt.moe_layers(loop.chunks)
        handle = layers[0].experts.local_experts[0].register_forward_hook(lambda *args: None)
        handle.remove()
        layers[0].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
        layers[1].router.register_forward_hook(lambda module, args, output: seen.append(1))
        losses = []
        for step in range(4):
            loop.zero()
            losses.append(loop.call(step, 2))
            # in use between steps only, as for an evaluation
            handle = layers[1].experts.local_experts[1].register_forward_hook(lambda *args: None)
            loop.evaluate(step)
            handle.remove()
            loop.update()
        return losses, seen

    stock, ours = train(None), train(tiny_gpt.fssdp_hook())
    assert ours[1] == stock[1]
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)


@pytest.mark.newest
@ranks(2, preload="te")
def test_megatrons_own_loggers() -> None:
    """``--save-activations-interval`` and its siblings: the iteration runs without replicas, so its records are stock's."""
    import te_on_cpu

    te_on_cpu.install()
    import loops
    import megatron.training.activation_logging as activations
    import megatron.training.dgrad_logging as gradients
    import tiny_gpt

    # stock's own hooks for gradients fail on the other linears of this model
    gradients.LINEAR_TYPES = tuple(t for t in gradients.LINEAR_TYPES if "Grouped" in t.__name__)
    case = tiny_gpt.Case(skew=4, grouped=True)
    tiny_gpt.initialize(case)

    def train(hook: Callable | None) -> tuple[list[float], dict[str, Any], list[int]]:
        loop = loops.Loop(case, hook)
        losses, replicas = [], []
        records: dict[str, Any] = {}
        for step in range(5):
            loop.zero()
            if step in (0, 3):
                activations._LOGGER = gradients._LOGGER = None
                activations.enable_tokens_per_expert_logging(loop.chunks, ".")
                activations.enable_activation_logging(loop.chunks, ".")
                gradients.enable_dgrad_logging(loop.chunks, ".")
            losses.append(loop.call(step, 2))
            if step in (0, 3):
                records[f"tokens {step}"] = dict(activations._LOGGER._decoder_tpe_records)
                for logged in (
                    activations._LOGGER._activations_state_dict,
                    gradients._LOGGER._dgrads_state_dict,
                ):
                    for of_chunk in logged.values():
                        records |= {
                            f"{name} {step}": value
                            for name, value in of_chunk.items()
                            if ".experts." in name and isinstance(value, torch.Tensor)
                        }
                activations.disable_tokens_per_expert_logging()
                activations.disable_activation_logging()
                gradients.disable_dgrad_logging()
            if hook is not None:
                layers = tiny_gpt.moe_layers(loop.chunks)
                replicas.append(max(layer.fssdp.placement.num_replicas for layer in layers))
            loop.update()
        return losses, records, replicas

    stock, wanted, _ = train(None)
    for settings in (dict(), dict(lifetime="layer", late_replicas=4)):
        losses, records, replicas = train(tiny_gpt.fssdp_hook(**settings))
        assert [bool(count) for count in replicas] == [False, True, True, False, True]
        assert losses == pytest.approx(stock, rel=1e-5)
        assert records.keys() == wanted.keys() and len(wanted) > 10
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(records[name], value, rtol=1e-4, atol=1e-6, msg=name)
            else:
                assert value == records[name], name


def _no_expert(experts: Any) -> None:
    experts.local_experts[0] = _Same()


def _identity(experts: Any) -> None:
    experts.local_experts[2] = _Same()


def _narrow(experts: Any) -> None:
    expert = experts.local_experts[3]
    expert.linear_fc1.weight = torch.nn.Parameter(expert.linear_fc1.weight[:64].clone())


def _narrow_on_rank_1(experts: Any) -> None:
    if torch.distributed.get_rank() == 1:
        for expert in experts.local_experts:
            expert.linear_fc1.weight = torch.nn.Parameter(expert.linear_fc1.weight[:64].clone())


def _one_activation(experts: Any) -> None:
    experts.local_experts[1].activation_func = torch.nn.functional.gelu


def _closures(experts: Any) -> None:
    for index, expert in enumerate(experts.local_experts):
        expert.activation_func = lambda x, index=index: index * x


def _forward_of_all(experts: Any) -> None:
    """Looks like Megatron's own, and would run it instead of ours."""
    experts.forward = functools.wraps(experts.forward)(lambda *args: None)


UNEQUAL: dict[Change, str] = {
    _no_expert: "layer 1: expert 0 of this rank, a _Same, has no parameters",
    _identity: "layer 1: expert 2 of this rank has class=_Same, expert 0 has class=MLP",
    _narrow: "layer 1: expert 3 of this rank has linear_fc1.weight=64x32, expert 0 has linear_fc1.weight=128x32",
    _narrow_on_rank_1: "rank 1 has experts of layer 1='parameters of 64x32, 32x64', rank 0 has experts of layer "
    "1='parameters of 128x32, 32x64'",
    _closures: "layer 1: expert 1 of this rank has activation_func=_closures.<locals>.<lambda>, expert 0 has",
    _forward_of_all: "layer 1: its experts (megatron.core.transformer.moe.experts.SequentialMLP) have a forward on "
    "the instance",
    _one_activation: "layer 1: expert 1 of this rank has activation_func=gelu, expert 0 has activation_func=silu",
}


@ranks(2)
def test_experts_of_unequal_kind_or_size() -> None:
    import tiny_gpt

    tiny_gpt.initialize(tiny_gpt.Case())
    for change, message in UNEQUAL.items():
        chunks, _ = tiny_gpt.build(tiny_gpt.Case())
        change(tiny_gpt.moe_layers(chunks)[0].experts)
        with pytest.raises(ValueError, match="FSSDP cannot be switched on") as error:
            tiny_gpt.fssdp_hook()(chunks)
        assert message in str(error.value), change.__name__
        assert not any(hasattr(layer, "fssdp") for layer in tiny_gpt.moe_layers(chunks))


@ranks(2)
def test_one_module_of_experts_in_two_layers() -> None:
    """Refused with any number of slots; observing it changes nothing; equal weights in two modules train as stock."""
    import loops
    import tiny_gpt

    case = tiny_gpt.Case(skew=4)
    tiny_gpt.initialize(case)

    def tie(chunks: list) -> list:
        first, second = tiny_gpt.moe_layers(chunks)
        second.experts = first.experts
        return chunks

    def tie_weights(chunks: list) -> list:
        first, second = tiny_gpt.moe_layers(chunks)
        for one, other in zip(first.experts.modules(), second.experts.modules(), strict=True):
            other._parameters.update(one._parameters)
        return chunks

    def train(hook: Callable[[list], list]) -> list[float]:
        loop = loops.Loop(case, hook)
        losses = []
        for step in range(3):
            loop.zero()
            losses.append(loop.call(step, 2))
            loop.update()
        return losses

    for slots in (0, 2):
        chunks, _ = tiny_gpt.build(case)
        with pytest.raises(ValueError, match=r"layer 1, layer 2 share one module of experts; give"):
            tiny_gpt.fssdp_hook(slots=slots)(tie(chunks))
        assert not any(hasattr(layer, "fssdp") for layer in tiny_gpt.moe_layers(chunks))
    observe = tiny_gpt.fssdp_hook(observe=True, record=os.environ["TEST_FOLDER"] + "/observed")
    assert train(lambda chunks: observe(tie(chunks))) == train(tie)
    ours = train(lambda chunks: tiny_gpt.fssdp_hook()(tie_weights(chunks)))
    assert ours == pytest.approx(train(tie_weights), rel=1e-5)
    chunks, _ = tiny_gpt.build(case, tiny_gpt.fssdp_hook())
    with pytest.raises(
        TypeError, match=r"with FSSDP cannot be copied or pickled, .* state_dict\(\)"
    ):
        copy.deepcopy(chunks[0])
