"""Code that is attached to single experts would miss the tokens of replicas: refused, whenever it is attached.

Oracle: literal messages; for Megatron's own loggers, the records of stock Megatron. Case by case: hand-made LoRA and
scaling, activation statistics, steering, pruning, `torch.nn.utils.parametrize`, experts of unequal kind or size.
"""

from __future__ import annotations

import copy
import functools
import operator
import os
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import tiny_gpt
import torch
from model_state import refusal
from ranks import ranks
from torch.nn import Identity, Linear, Sequential
from torch.nn.utils import parametrize

Change = Callable[[Any], None]  # of one expert, Megatron's MLP


def _ignore(*args: Any) -> None:
    """A hook."""


def _wrap_forward(expert: Any) -> None:
    """`functools.wraps` makes the function look like Megatron's own."""
    expert.forward = functools.wraps(expert.forward)(lambda *args: None)


def _bind_method(expert: Any) -> None:
    expert.forward = types.MethodType(type(expert).forward, expert)


def _observe(expert: Any) -> None:
    expert.register_forward_hook(_ignore)


def _wrap_linear(expert: Any) -> None:
    """As an adapter does."""
    expert.linear_fc1 = Sequential(expert.linear_fc1)


def _parametrize(expert: Any) -> None:
    parametrize.register_parametrization(expert.linear_fc1, "weight", Identity())


def _subclass(expert: Any) -> None:
    expert.__class__ = type("Expert", (type(expert),), {})


OF_TEST = r"of .*test_expert_parts"
ATTACHED: list[tuple[Change, str]] = [
    (_wrap_forward, rf"1 \(Sequential\) has a forward {OF_TEST} on the instance"),
    (_bind_method, r"1 \(Sequential\) has a forward of .* on the instance"),
    (_observe, rf"1 \(Sequential\) has a forward hook {OF_TEST}"),
    (
        lambda expert: expert.linear_fc1.register_forward_pre_hook(_ignore),
        rf"1.linear_fc1 \(Linear\) has a forward pre-hook {OF_TEST}",
    ),
    (
        lambda expert: expert.linear_fc2.register_full_backward_hook(_ignore),
        rf"1.linear_fc2 \(Linear\) has a backward hook {OF_TEST}",
    ),
    (
        lambda expert: expert.register_full_backward_pre_hook(_ignore),
        rf"1 \(Sequential\) has a backward pre-hook {OF_TEST}",
    ),
    (_parametrize, r"1.linear_fc1 has become a ParametrizedLinear"),
    (
        lambda expert: torch.nn.utils.weight_norm(expert.linear_fc1),
        r"1.linear_fc1 \(Linear\) has a forward pre-hook of torch.nn.utils.weight_norm",
    ),
    (_wrap_linear, r"1.linear_fc1 has become a Sequential"),
    (_subclass, r"1 has become a Expert"),
    (lambda expert: expert.compile(backend="eager"), r"1 \(Sequential\) has a forward of "),
]


@pytest.mark.fast
@pytest.mark.parametrize(("change", "message"), ATTACHED)
def test_code_on_one_expert_is_named(change: Change, message: str) -> None:
    from megatron_hecate.megatron.foreign_code import ExpertParts

    linears = [OrderedDict(linear_fc1=Linear(2, 2), linear_fc2=Linear(2, 2)) for _ in range(2)]
    experts = torch.nn.ModuleList(map(Sequential, linears))
    parts = ExpertParts(experts)
    parts.check()
    change(experts[1])
    with pytest.raises(ValueError, match=rf"inside its experts {message}.*; remove it, "):
        parts.check()


# What is refused once FSSDP is on, and before.
LATER: dict[Change, tuple[str, str]] = {
    _observe: (r"local_experts.1 \(MLP\) has a forward hook",) * 2,
    _wrap_linear: (
        r"local_experts.1.linear_fc1 has become a Sequential",
        r"expert 1 of this rank has linear_fc1.class=Sequential, expert 0 has linear_fc1.class=Column",
    ),
}


def _on_rank_1(chunks: list, change: Change) -> list:
    """Change the second expert of rank 1 in the second layer: rank 0 sees nothing of it."""
    if torch.distributed.get_rank() == 1:
        change(tiny_gpt.moe_layers(chunks)[1].experts.local_experts[1])
    return chunks


@ranks(2)
def test_before_switch_on_after_it_and_later() -> None:
    """All ranks raise the same error, by the first step at the latest. Later, here on all ranks, one that notices raises
    where the next iteration begins, however often it is called."""
    case = tiny_gpt.initialized(skew=4)
    for change, (message, before) in LATER.items():
        chunks, _ = tiny_gpt.build(case)
        with pytest.raises(ValueError, match=f"layer 2: .*{before}"):
            tiny_gpt.fssdp_hook()(_on_rank_1(chunks, change))
        run = tiny_gpt.Model(case, tiny_gpt.fssdp_hook())
        _on_rank_1(run.chunks, change)
        cannot_run = r"FSSDP cannot run:\n  - layer {0}: .*" + message
        with pytest.raises(ValueError, match=cannot_run.format(2)) as error:
            run.call(0, 1)
        assert str(error.value).endswith("(rank 1)"), error.value
        run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
        for layer in tiny_gpt.moe_layers(run.chunks):
            change(layer.experts.local_experts[1])
        run.zero()
        for _ in range(2):
            with pytest.raises(ValueError, match=cannot_run.format(1)):
                run.call(2, 1)


@ranks(2)
def test_hooks_that_are_removed_in_time_or_attached_elsewhere() -> None:
    """They train as stock."""
    case = tiny_gpt.initialized(skew=4, accumulate=2)

    def train(hook: Callable | None) -> tuple[list[float], list[int]]:
        run, seen = tiny_gpt.train(case, steps=0, hook=hook), list[int]()
        layers = tiny_gpt.moe_layers(run.chunks)
        handle = layers[0].experts.local_experts[0].register_forward_hook(_ignore)
        handle.remove()
        layers[0].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
        layers[1].router.register_forward_hook(lambda module, args, output: seen.append(1))
        for step in range(4):
            run.step(step)
            # in use between steps only, as for an evaluation
            handle = layers[1].experts.local_experts[1].register_forward_hook(_ignore)
            run.evaluate(step)
            handle.remove()
        return run.losses, seen

    stock, ours = train(None), train(tiny_gpt.fssdp_hook())
    assert ours[1] == stock[1]
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)


@pytest.mark.newest
@ranks(2, preload="te")
def test_megatrons_own_loggers() -> None:
    """``--save-activations-interval`` and its siblings: the iteration runs without replicas, so its records are stock's."""
    import megatron.training.activation_logging as activations
    import megatron.training.dgrad_logging as gradients

    # stock's own hooks for gradients fail on the other linears of this model
    gradients.LINEAR_TYPES = tuple(t for t in gradients.LINEAR_TYPES if "Grouped" in t.__name__)
    case = tiny_gpt.initialized(skew=4, grouped=True, accumulate=2)

    def train(hook: Callable | None) -> tuple[list[float], dict[str, Any], list[int]]:
        run, replicas = tiny_gpt.train(case, steps=0, hook=hook), []
        records: dict[str, Any] = {}
        for step in range(5):
            if step in (0, 3):
                activations._LOGGER = gradients._LOGGER = None
                activations.enable_tokens_per_expert_logging(run.chunks, ".")
                activations.enable_activation_logging(run.chunks, ".")
                gradients.enable_dgrad_logging(run.chunks, ".")
            run.step(step)
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
            replicas.append(tiny_gpt.num_replicas(run.chunks))
        return run.losses, records, replicas

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


def _narrow(expert: Any) -> None:
    expert.linear_fc1.weight = torch.nn.Parameter(expert.linear_fc1.weight[:64].clone())


def _narrow_on_rank_1(experts: Any) -> None:
    if torch.distributed.get_rank() == 1:
        for expert in experts.local_experts:
            _narrow(expert)


def _use_gelu(experts: Any) -> None:
    experts.local_experts[1].activation_func = torch.nn.functional.gelu


def _use_closures(experts: Any) -> None:
    for index, expert in enumerate(experts.local_experts):
        expert.activation_func = lambda x, index=index: index * x


# changes of a layer's experts
UNEQUAL: list[tuple[Change, str]] = [
    (
        lambda experts: operator.setitem(experts.local_experts, 0, Identity()),
        "layer 1: expert 0 of this rank, a Identity, has no parameters",
    ),
    (
        lambda experts: operator.setitem(experts.local_experts, 2, Identity()),
        "layer 1: expert 2 of this rank has class=Identity, expert 0 has class=MLP",
    ),
    (
        lambda experts: _narrow(experts.local_experts[3]),
        "expert 3 of this rank has linear_fc1.weight=64x32, expert 0 has linear_fc1.weight=128x32",
    ),
    (
        _narrow_on_rank_1,
        "rank 1 has experts of layer 1='parameters of 64x32, 32x64', "
        "rank 0 has experts of layer 1='parameters of 128x32, 32x64'",
    ),
    (
        _use_closures,
        "expert 1 of this rank has activation_func=_use_closures.<locals>.<lambda>, expert 0 has",
    ),
    # looks like Megatron's own, and would run it instead of ours
    (
        _wrap_forward,
        "its experts (megatron.core.transformer.moe.experts.SequentialMLP) have a forward on the instance",
    ),
    (
        _use_gelu,
        "expert 1 of this rank has activation_func=gelu, expert 0 has activation_func=silu",
    ),
]


@ranks(2)
def test_experts_of_unequal_kind_or_size() -> None:
    case = tiny_gpt.initialized()
    for change, message in UNEQUAL:
        chunks, _ = tiny_gpt.build(case)
        change(tiny_gpt.moe_layers(chunks)[0].experts)
        assert message in refusal(chunks)
        assert not any(hasattr(layer, "fssdp") for layer in tiny_gpt.moe_layers(chunks))


@ranks(2)
def test_one_module_of_experts_in_two_layers() -> None:
    """Refused with any number of slots; observing it changes nothing; equal weights in two modules train as stock."""
    case = tiny_gpt.initialized(skew=4, accumulate=2)

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
        return tiny_gpt.train(case, hook=hook).losses

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
