"""One layer's quotas: loads exchanged, and this rank's row of the table that all ranks compute alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megatron_hecate.device_quotas import DeviceQuotas, Source
from megatron_hecate.dispatcher import Columns, gather_loads
from megatron_hecate.plan import Placement, World, split_quotas


def splits_on_device(loads: Tensor) -> bool:
    """Whether quotas of these loads are computed by torch operations instead of the compiled host code."""
    return loads.is_cuda


class LayerQuotas:
    """Quotas of one layer on this rank.

    Args:
        dispatcher: the layer's own, over homes.
        world: nodes of the FSSDP group.
        label: name of the layer in errors.
        timeout: seconds to wait for loads.
    """

    def __init__(self, dispatcher: MoETokenDispatcher, world: World, *, label: str, timeout: float) -> None:
        # all ranks whose tokens these experts see; with expert tensor parallelism, several per rank of the group
        self.sources: dist.ProcessGroup = dispatcher.tp_ep_group
        self._source_rank = [n // dispatcher.tp_size for n in range(self.sources.size())]
        self._world, self._label, self._timeout = world, label, timeout
        self._source: Source | None = None
        self._made_for: Placement | None = None  # columns and device quotas
        self._columns: Columns
        self._on_device: DeviceQuotas | None = None

    def gather_loads(self, routing_map: Tensor) -> Tensor:
        """[N, E] tokens of every source, on the device, from this source's ``routing_map`` [T, E]."""
        return gather_loads(routing_map, self.sources, label=self._label, timeout=self._timeout)

    def row(self, loads: Tensor, placement: Placement) -> tuple[Tensor, Columns]:
        """[C] this source's tokens for every column of ``placement``, and where the columns lie.

        Every rank computes the same table from the same loads [N, E] and takes its own row. On a GPU by operations
        whose result the host does not wait for; their reference is the compiled `split_quotas`, faster on a CPU.
        """
        own = self.sources.rank()
        if self._made_for is not placement:
            self._made_for = placement
            self._columns = Columns.of(placement, loads.device)
            self._on_device = None
            if splits_on_device(loads):
                if self._source is None:
                    self._source = Source.on(loads.device, self._world, own=own, source_rank=self._source_rank)
                self._on_device = self._source.quotas(placement)
        if self._on_device is not None:
            return self._on_device.row(loads), self._columns
        row = split_quotas(loads.numpy(), placement, self._world, source_rank=self._source_rank, only=own)
        return torch.from_numpy(row.tokens[0]), self._columns
