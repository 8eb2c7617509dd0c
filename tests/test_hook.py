"""Switching on: what the hook changes, what it leaves alone.

Oracle: the model before the hook (classes, parameters, state dict).
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from model_state import snapshot
from ranks import ranks

from megatron_hecate import HecateConfig, fssdp
from megatron_hecate.device import launch


@ranks(2)
def test_converts_in_place_and_once() -> None:
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    case = tiny_gpt.initialized()
    chunks, _ = tiny_gpt.build(case)
    layers = tiny_gpt.moe_layers(chunks)
    ids = [id(p) for p in chunks[0].parameters()]
    names = list(chunks[0].state_dict())
    modules = [name for name, _ in chunks[0].named_modules()]

    hook = tiny_gpt.fssdp_hook()
    assert hook(chunks) is chunks
    assert tiny_gpt.moe_layers(chunks) == layers and len(layers) == 2
    for layer in layers:
        assert isinstance(layer, MoELayer) and type(layer).__name__ == "FSSDPLayerMoELayer"
        assert isinstance(layer.experts, SequentialMLP)
    assert [id(p) for p in chunks[0].parameters()] == ids, "replicas must not be parameters"
    assert list(chunks[0].state_dict()) == names
    assert [name for name, _ in chunks[0].named_modules()] == modules, "no module may be added"

    after = snapshot(chunks)
    assert hook(chunks) is chunks and snapshot(chunks) == after, "idempotent"
    with pytest.raises(
        ValueError, match=r"runs FSSDP already, with .*slots=2.* asked for .*slots=3"
    ):
        tiny_gpt.fssdp_hook(slots=3)(chunks)
    (chunk,), _ = tiny_gpt.build(case)
    hook([chunk.decoder.layers[0]])
    with pytest.raises(ValueError, match="FSSDP cannot be switched on"):
        hook([chunk])  # whose second layer would stay stock


@pytest.mark.fast
def test_the_hook_can_be_pickled() -> None:
    """Launchers that start processes send it with the recipe."""
    hook = fssdp(HecateConfig(slots=3))
    assert pickle.loads(pickle.dumps(hook)) == hook != fssdp(HecateConfig(slots=2))


@ranks(2)
def test_an_exception_leaves_the_model_as_it_was() -> None:
    from megatron_hecate.switch_on import attach

    case = tiny_gpt.initialized()
    chunks, _ = tiny_gpt.build(case)
    before = snapshot(chunks)
    original = attach._subclass
    calls = []

    def fails_at_the_third(mixin: type, base: type) -> type:
        calls.append(base)
        if len(calls) == 3:
            raise RuntimeError("planted")
        return original(mixin, base)

    attach._subclass = fails_at_the_third
    with pytest.raises(RuntimeError, match="planted"):
        tiny_gpt.fssdp_hook()(chunks)
    assert snapshot(chunks) == before
    attach._subclass = original
    tiny_gpt.fssdp_hook()(chunks)  # and it can still be switched on
    assert all(hasattr(m, "fssdp") for m in tiny_gpt.moe_layers(chunks))


@pytest.mark.newest
@ranks(4)
def test_a_stage_without_moe_layers() -> None:
    """It trains, and no rank asks others that have nothing to do where Megatron is given the hook twice."""
    from megatron.core import parallel_state

    # two dense layers, then two MoE layers: the first of two pipeline stages has no expert
    settings = (("num_layers", 4), ("moe_layer_freq", [0, 0, 1, 1]))
    case = tiny_gpt.initialized(pp=2, accumulate=2, settings=settings)
    stock = tiny_gpt.train(case)
    ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook())
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    for observe in (False, True):
        folder = f"{os.environ['TEST_FOLDER']}/{observe}"
        settings = HecateConfig(observe=observe, speeds=tiny_gpt.FREE, timeout=15, record=folder)
        hook = fssdp(settings)
        chunks = hook(tiny_gpt.build(case)[0])
        assert hook(chunks) is chunks
        wrapped = tiny_gpt.wrap(case, chunks, chunks[0].config)[0]
        assert hook(wrapped) is wrapped
        stage = parallel_state.get_pipeline_model_parallel_rank()
        assert len(tiny_gpt.moe_layers(hook(tiny_gpt.build(case)[0]))) == 2 * stage


@ranks(2)
def test_a_rank_without_a_compiler_stops_all_at_switch_on() -> None:
    """Rank 1 has no C++ compiler and nothing compiled: every rank is told, names the machine and what to install, and
    the model stays as it was. With a transport that needs no kernels, too: quotas do."""
    case = tiny_gpt.initialized()
    chunks, _ = tiny_gpt.build(case)
    before = snapshot(chunks)
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == 1:
        launch._load_for_host.cache_clear()
        patch.setenv("PATH", "/nowhere")
        patch.setenv("MEGATRON_HECATE_CACHE", os.environ["TEST_FOLDER"] + "/empty")
        patch.delenv("CXX", raising=False)
    message = r"the kernels cannot be compiled: CPU ranks need a C\+\+ compiler .* \(apt-get install g\+\+\)"
    with patch.context(), pytest.raises(ValueError, match=message):
        tiny_gpt.fssdp_hook(transport="p2p")(chunks)
    patch.undo()
    assert snapshot(chunks) == before
    tiny_gpt.fssdp_hook(transport="p2p")(chunks)  # and works once there is one


# functions, and whether they are called where FSSDP observes
FAILING = {
    "switch_on.proposal._find_unsupported": False,
    "megatron.assumptions.broken_assumptions": False,
    "step.layer_state.physical_dispatcher": False,
    "record.observe._observed": True,
}


@ranks(2)
def test_an_exception_that_nobody_expects_stops_all_ranks(tmp_path: Path) -> None:
    """It is raised by one rank alone, which names it; no rank waits, and a model to convert stays as it was."""

    def fail(*_: object, **__: object) -> None:
        raise KeyError("a name that no table has")

    case = tiny_gpt.initialized()
    for name, observes in FAILING.items():
        chunks, _ = tiny_gpt.build(case)
        before = snapshot(chunks)
        patch = pytest.MonkeyPatch()
        if dist.get_rank() == 1:
            patch.setattr(f"megatron_hecate.{name}", fail)
        with (
            patch.context(),
            pytest.raises(ValueError, match="KeyError: 'a name that no table has'"),
        ):
            tiny_gpt.fssdp_hook(observe=observes, record=str(tmp_path))(chunks)
        patch.undo()
        if not observes:
            assert snapshot(chunks) == before
            tiny_gpt.fssdp_hook()(chunks)


@ranks(2)
def test_the_hook_takes_a_model_or_its_chunks() -> None:
    case = tiny_gpt.initialized()
    for form in (
        lambda model: model,
        lambda model: [model],
        lambda model: (model,),
        lambda m: torch.nn.ModuleList([m]),
    ):
        given = form(tiny_gpt.build(case)[0][0])
        assert tiny_gpt.fssdp_hook()(given) is given
        chunks = [given] if isinstance(given, torch.nn.Module) else given
        assert all(hasattr(layer, "fssdp") for layer in tiny_gpt.moe_layers(chunks))
    model = tiny_gpt.build(case)[0][0]
    for wrong, shown in (
        (None, "a NoneType"),
        ([[model]], "a list of list"),
        (iter([model]), "a list_iterator"),
    ):
        for observing in (False, True):
            with pytest.raises(
                TypeError, match=f"takes a list of model chunks, or a model, got {shown}"
            ):
                fssdp(HecateConfig(observe=observing))(wrong)


@ranks(4)
def test_chunks_one_at_a_time() -> None:
    """As mbridge calls it, after each chunk of a virtual pipeline and with arguments of its own.

    DDP then converts them together; without it the first step is refused. Oracle: the same model,
    converted as a list.
    """
    case = tiny_gpt.initialized(pp=2, vpp=2, accumulate=4)
    one_by_one = tiny_gpt.fssdp_hook()

    def hook(chunks: list) -> list:
        for chunk in chunks:
            one_by_one(chunk, pre_process=True, post_process=False, config=chunk.config)
            assert not any(hasattr(layer, "fssdp") for layer in tiny_gpt.moe_layers(chunks))
        return chunks

    optimizer = torch.optim.SGD(hook(tiny_gpt.build(case)[0])[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="it was asked for, and SGD is about to step"):
        optimizer.step()
    for _ in range(2):  # a policy and a critic
        ours = tiny_gpt.train(case, hook=hook)
        layers = tiny_gpt.moe_layers(ours.chunks)
        assert len(layers) == 2 and len({id(layer.prefetcher) for layer in layers}) == 1
        one_by_one(ours.chunks[1].module)  # again: nothing changes
    whole = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook())
    assert tiny_gpt.difference(whole, ours) == tiny_gpt.SAME


@ranks(2)
def test_the_hook_after_ddp_is_refused() -> None:
    """Given what wraps the model, or the model that is wrapped; whatever the slots."""
    case = tiny_gpt.initialized(bf16=True, distributed_optimizer=True)
    message = "DistributedDataParallel has wrapped the model already; call the"
    for slots in (0, 2):
        chunks, config = tiny_gpt.build(case)
        wrapped, _ = tiny_gpt.wrap(case, chunks, config)
        for given in (wrapped, chunks, wrapped[0]):
            with pytest.raises(ValueError, match=message):
                tiny_gpt.fssdp_hook(slots=slots)(given)
        assert not any(hasattr(layer, "fssdp") for layer in tiny_gpt.moe_layers(chunks))
