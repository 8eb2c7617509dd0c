"""The conversion hook: agree on all ranks (`proposal`), then attach, or change nothing."""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any

import torch.distributed as dist
from megatron.core.parallel_state import get_expert_data_parallel_group
from torch.nn import Module, ModuleList

from megatron_hecate.comm.agreement import refuse
from megatron_hecate.comm.collectives import gather_objects
from megatron_hecate.comm.groups import new_group
from megatron_hecate.config import HecateConfig
from megatron_hecate.faults import watchdog
from megatron_hecate.plan import World
from megatron_hecate.record.job_metrics import JobMetrics
from megatron_hecate.record.job_sizes import folder_of_model
from megatron_hecate.record.observe import observe
from megatron_hecate.step.layer_state import LayerState
from megatron_hecate.switch_on.attach import Chunks, Model, attach
from megatron_hecate.switch_on.entry import converted_parts, num_chunks
from megatron_hecate.switch_on.proposal import Proposal
from megatron_hecate.switch_on.request import REQUEST


# With slots, because Bridge copies the contents of a model's configuration and sets attributes.
@dataclasses.dataclass(frozen=True, slots=True)
class Hook:
    """Hook of `megatron_hecate.fssdp`; an object, so that it can be pickled and compared."""

    config: HecateConfig

    def __call__(self, model: Any, **_: Any) -> Any:
        """Convert ``model``; keyword arguments are those of mbridge's callbacks."""
        chunks = _chunks_of(model)
        rank_model = Model.find(chunks)
        converted = converted_parts(chunks)
        refuse(
            f"this model runs FSSDP already, with {settings}; asked for {self.config}"
            for settings in {part._fssdp_settings for part in converted} - {self.config}
        )
        within = set(chain.from_iterable(part.modules() for part in converted))
        if converted and within.issuperset(rank_model.layers):
            return model
        config = getattr(chunks[0], "config", None) if len(chunks) == 1 else None
        if config is not None and num_chunks(config) > 1:
            # One of several chunks, as from mbridge. They share buffers and iterations, so that
            # `entry` converts all chunks together, where DDP wraps the first.
            REQUEST.add(config, self.config.as_arguments())
            return model
        if self.config.observe:
            observe(chunks, self.config)
        else:
            _convert(rank_model, self.config)
        # kept with the chunks, because a pipeline stage may have no MoE layers
        for chunk in chunks:
            chunk._fssdp_settings = self.config
        REQUEST.is_answered = True
        return model


def _convert(model: Model, config: HecateConfig) -> None:
    """Convert ``model`` and print a summary on rank 0. Collective."""
    proposal = Proposal.make(model, config)
    # the model is unchanged until here
    resolved, notes = proposal.agree()
    transport = proposal.connection.transport
    ranks = [] if transport is None else dist.get_process_group_ranks(transport.group)
    watchdog.watch(ranks, timeout=config.timeout)
    folder = config.folder and folder_of_model(config.folder)
    homes_group = _homes_group(ranks, config) if config.rehome else None
    if transport is None:
        JobMetrics(())
    else:
        world = World(proposal.connection.nodes, proposal.speeds)
        states = [
            LayerState(part, index, resolved, world=world, transport=transport)
            for index, part in enumerate(proposal.parts)
        ]
        attach(model, states, homes_group, folder)
    if dist.get_rank() == 0:
        proposal.print_summary(notes, resolved)
        if folder != config.folder:
            text = f"another model has {config.folder}; the folder of this one is {folder}"
            print(f"FSSDP: {text}", flush=True)


def _homes_group(ranks_here: list[int], config: HecateConfig) -> dist.ProcessGroup | None:
    """Create the process group in which experts change homes. Collective.

    Its ranks are the ranks of all expert-parallel groups that share the experts' gradients.
    """
    if not ranks_here:
        return None
    expert_data = get_expert_data_parallel_group()
    what = "finding the ranks with the same experts"
    groups = gather_objects(ranks_here, expert_data, what=what, label="homes")
    ranks = sorted(set(chain.from_iterable(groups)))
    return new_group(ranks, description="fssdp homes", timeout=config.timeout)


def _chunks_of(model: Any) -> Chunks:
    """Return the chunks of a list, a tuple or a `ModuleList` of chunks, or of one model."""
    if isinstance(model, Module) and not isinstance(model, ModuleList):
        return [model]
    if isinstance(model, list | tuple | ModuleList) and all(
        isinstance(chunk, Module) for chunk in model
    ):
        return list(model)
    text = f"a {type(model).__name__}"
    if isinstance(model, list | tuple) and model:
        text += f" of {', '.join(sorted({type(part).__name__ for part in model}))}"
    raise TypeError(f"the hook takes a list of model chunks, or a model, got {text}")
