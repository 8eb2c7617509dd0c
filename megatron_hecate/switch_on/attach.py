"""Conversion of all layers of a model at once; an exception undoes every change."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module

from megatron_hecate.graphs.iteration import GraphedIteration
from megatron_hecate.graphs.monitor import GraphedMonitor
from megatron_hecate.homes.converters import restore_homes_before_conversions
from megatron_hecate.homes.schedule import HomesSchedule
from megatron_hecate.megatron.cuda_graphs import captured_parts
from megatron_hecate.megatron.data_parallel import DataParallel
from megatron_hecate.megatron.experts import FSSDPExperts
from megatron_hecate.megatron.rules import SettingSources
from megatron_hecate.record.layer_recorder import LayerRecorder
from megatron_hecate.routes.known_routes import KnownRoutes
from megatron_hecate.step.layer import FSSDPLayer, GraphedBlock
from megatron_hecate.step.layer_state import LayerState
from megatron_hecate.step.prefetch import Prefetcher
from megatron_hecate.switch_on import unsupported, wrappers

Chunks = list[Module]


@dataclasses.dataclass(frozen=True)
class Model:
    """Part of a model to convert on this rank.

    Args:
        chunks: model chunks of this rank.
        layers: index of the chunk of each MoE layer, in the order of the forward.
    """

    chunks: Chunks
    layers: dict[MoELayer, int]

    @classmethod
    def find(cls, chunks: Chunks) -> Model:
        """Find all MoE layers of ``chunks``."""
        modules = [(module, i) for i, chunk in enumerate(chunks) for module in chunk.modules()]
        return cls(chunks, {part: i for part, i in modules if isinstance(part, MoELayer)})

    def find_conflicts(self) -> list[str]:
        """List conflicts of the model, as it is now, with replicas.

        Wrappers and adapters may be added after the hook.
        """
        return unsupported.find(wrappers.model_settings(self.chunks), slots=0)


def attach(
    model: Model,
    states: list[LayerState],
    homes_group: dist.ProcessGroup | None,
    folder: str | None,
) -> None:
    """Convert all layers of ``model``; an exception undoes every change.

    Args:
        model: model to convert.
        states: state of each layer.
        homes_group: group in which experts change homes; ``None`` without rehoming.
        folder: folder of the record, if there is one.
    """
    prefetcher = _make_prefetcher(states)
    clock = prefetcher.clock
    if homes_group is not None:
        prefetcher.rehoming = HomesSchedule(
            states,
            homes_group,
            optimizers=prefetcher.detector.optimizers,
            last_loads=lambda: prefetcher.monitor.history.last,
            clock=clock,
            meter=prefetcher.meter,
        )
    recorder = LayerRecorder(
        states,
        prefetcher.meter,
        clock,
        folder=folder,
        collect=prefetcher.monitor.collect_ready,
    )
    prefetcher.monitor.recorder = recorder
    orders = states[0].config.slots > 0
    data_parallel = DataParallel(len(model.chunks), prefetcher.detector, orders=orders)
    prefetcher.returns.data_parallel = data_parallel
    # The recorder takes what the prefetcher has collected.
    clock.listeners = [data_parallel, prefetcher, recorder]
    blocks = _blocks_by_layer(model.chunks)
    with contextlib.ExitStack() as undo:
        for layer, state in zip(model.layers, states, strict=True):
            _attach_layer(undo, layer, state=state, prefetcher=prefetcher)
            if (block := blocks.get(id(layer))) is not None:
                _attach_block(undo, block, layer)
        if prefetcher.rehoming is not None:
            # a framework may keep its converter of weights in the configuration that chunks share
            configs = [getattr(chunk, "config", None) for chunk in model.chunks]
            converters = [getattr(config, "bridge", None) for config in configs]
            restore_homes_before_conversions(prefetcher.rehoming, converters)
        prefetcher.find_conflicts = model.find_conflicts
        for index, chunk in enumerate(model.chunks):
            _assign(undo, chunk, fssdp_data_parallel=(data_parallel, index))
            begin = functools.partial(prefetcher.begin_chunk, index)
            undo.callback(chunk.register_forward_pre_hook(begin).remove)
            # also called after an exception in the forward
            end = chunk.register_forward_hook(prefetcher.end_chunk, always_call=True)
            undo.callback(end.remove)
        # nothing has failed: keep the changes
        undo.pop_all()


def _make_prefetcher(states: list[LayerState]) -> Prefetcher:
    """Make the prefetcher of a model, of whose iterations one CUDA graph may hold all launches."""
    if states[0].covered is None:
        return Prefetcher(states, KnownRoutes(states))
    prefetcher = Prefetcher(states, KnownRoutes(states), GraphedMonitor)
    prefetcher.detector.graphed = GraphedIteration(prefetcher)
    return prefetcher


def _attach_layer(
    undo: contextlib.ExitStack, layer: MoELayer, *, state: LayerState, prefetcher: Prefetcher
) -> None:
    """Convert a layer and its expert module, and hook into loading and saving of weights."""
    experts = layer.experts
    rehoming = prefetcher.rehoming
    clock = prefetcher.clock
    _assign(
        undo,
        layer,
        fssdp=state,
        prefetcher=prefetcher,
        __class__=_subclass(FSSDPLayer, type(layer)),
    )
    if state.always_physical:
        _assign(undo, layer, token_dispatcher=state.physical_dispatcher)
    if state.is_captured:
        # A CUDA graph returns the dispatcher's attributes that are listed by name.
        for dispatcher in (state.stock_dispatcher, state.physical_dispatcher):
            names = [*dispatcher.cudagraph_attrs, "expert_loads"]
            _assign(undo, dispatcher, cudagraph_attrs=names)
    _assign(
        undo,
        experts,
        physical=state.parts.experts,
        restore_homes=None if rehoming is None else rehoming.restore,
        __class__=_subclass(FSSDPExperts, type(experts)),
    )

    def loaded(*_: Any) -> None:
        clock.end_iteration("weights were loaded")

    undo.callback(experts.register_load_state_dict_post_hook(loaded).remove)
    if rehoming is not None:
        refuse = rehoming.refuse_if_moved
        undo.callback(experts.register_state_dict_pre_hook(refuse).remove)
        undo.callback(experts.register_load_state_dict_pre_hook(refuse).remove)


def _attach_block(undo: contextlib.ExitStack, block: Module, layer: FSSDPLayer) -> None:
    """Call the layer before the attention of its transformer layer ``block``."""
    # CUDA graphs run no hooks, and Megatron refuses to capture modules with hooks
    if captured_parts(SettingSources(layer.config)):
        _assign(undo, block, __class__=_subclass(GraphedBlock, type(block)))
    else:
        hook = block.self_attention.register_forward_pre_hook(
            layer.attention_hook, with_kwargs=True
        )
        undo.callback(hook.remove)


def _blocks_by_layer(chunks: Chunks) -> dict[int, Module]:
    """Map the id of each transformer layer's ``mlp``, which follows attention, to the layer."""
    return {
        id(module.mlp): module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(getattr(module, "self_attention", None), Module) and hasattr(module, "mlp")
    }


def _assign(undo: contextlib.ExitStack, target: Any, **attributes: Any) -> None:
    """Set attributes of ``target``, and register the restoration of the old values on ``undo``."""
    for name, value in attributes.items():
        if name == "__class__" or name in vars(target):
            undo.callback(setattr, target, name, getattr(target, name))
        else:
            undo.callback(delattr, target, name)
        setattr(target, name, value)


@functools.cache
def _subclass(mixin: type, base: type) -> type:
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})
