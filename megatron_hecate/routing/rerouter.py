"""Experts in, physical experts out: Megatron's own dispatcher does the rest.

The router speaks of E experts. Megatron's dispatcher is built once more over R x P *physical* experts, and each token's
choice of an expert becomes a choice of one of its holders, by quota: of this rank's tokens for an expert, in order, the
first so many go to the first holder, the next to the second.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.device.launch import Kernels
from megatron_hecate.job.collectives import wait_collective
from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.quotas import QuotaTables
from megatron_hecate.routing.reroute import CountedTokens, reroute
from megatron_hecate.routing.tables import GroupShape


class Rerouter:
    """Sends every token of this rank to a holder of its expert, in one layer.

    Args:
        dispatcher: the layer's own, over homes.
        world: nodes of the FSSDP group.
        label: name of the layer in errors.
        timeout: seconds to wait for loads.
    """

    def __init__(self, dispatcher: Any, world: World, *, label: str, timeout: float) -> None:
        # all ranks whose tokens these experts see; with expert tensor parallelism, several per rank of the FSSDP group
        self.sources: dist.ProcessGroup = dispatcher.tp_ep_group
        self._source_rank = [n // dispatcher.tp_size for n in range(self.sources.size())]
        self._world, self._label, self._timeout = world, label, timeout
        config = dispatcher.config
        backend = (
            config.moe_flex_dispatcher_backend
            if config.moe_token_dispatcher_type == "flex"
            else None
        )
        # its first dispatch makes one buffer for all layers, for so many experts: they must be physical from then on
        self.always_physical = backend in ("hybridep", "ncclep")
        self._by_probability = backend in (
            "deepep",
            "ncclep",
        )  # its experts are the largest probabilities of a token
        self._padded = config.moe_pad_expert_input_to_capacity
        self._kernels: Kernels | None = (
            None  # loaded for the device of the first placement, as the tables are
        )
        self._tables: QuotaTables | None = None

    def without_padding(self, routing_map: Tensor, probs: Tensor) -> Tensor:
        """[T, E] bool routing map of the tokens that an expert was chosen for. Padding to capacity adds others, whose
        probability is zero: they change neither outputs nor gradients."""
        return routing_map & (probs.detach() != 0) if self._padded else routing_map

    @property
    def placed(self) -> Placement | None:
        """What `place` was called with last."""
        return None if self._tables is None else self._tables.placed

    def place(self, placement: Placement, device: torch.device) -> None:
        """From here on, tokens go to the holders of ``placement``: its tables are written, on the current stream, into
        buffers of ``device`` that never move. The host does not wait."""
        if self._tables is None:
            shape = GroupShape.of(self._world, placement, self._source_rank)
            self._kernels = self._kernels or Kernels(device)
            self._tables = QuotaTables(shape, device, self._kernels)
        self._tables.place(placement)

    def count(self, routing_map: Tensor) -> CountedTokens:
        """This source's tokens; ``routing_map`` [T, E] is theirs."""
        self._kernels = self._kernels or Kernels(routing_map.device)
        return CountedTokens.of(routing_map, self._kernels)

    def gather_loads(self, counted: CountedTokens) -> Tensor:
        """[N, E] int32 tokens of every source for every expert. On a GPU the stream waits for them, not the host.

        Raises:
            TransferError: naming the layer, when a rank dies or does not answer in time.
        """
        own = counted.loads
        loads = own.new_empty(self.sources.size() * len(own))
        work = dist.all_gather_into_tensor(loads, own, group=self.sources, async_op=True)
        wait_collective(
            work,
            loads,
            self.sources,
            what="gathering the loads",
            label=self._label,
            timeout=self._timeout,
        )
        return loads.view(self.sources.size(), -1)

    def reroute(
        self, probs: Tensor, counted: CountedTokens, loads: Tensor
    ) -> tuple[Tensor, Tensor]:
        """From experts to physical experts of the last placement. Every rank computes the same quotas.

        Args:
            probs: [T, E] routing probabilities, differentiable.
            counted: the same tokens.
            loads: [N, E], what `gather_loads` gave for them.

        Returns:
            As `routing.reroute`.
        """
        assert self._tables is not None, "place was not called"
        parts = self._tables.parts(loads, self.sources.rank())
        # an expert of probability zero would become any physical expert, an empty slot too
        return reroute(counted, probs, self._tables, parts, never_zero=self._by_probability)

    def to_homes(self, probs: Tensor, counted: CountedTokens) -> tuple[Tensor, Tensor]:
        """As `reroute`, where the last placement has no replicas: nothing is communicated."""
        assert self._tables is not None, "place was not called"
        return reroute(
            counted,
            probs,
            self._tables,
            self._tables.parts_of_homes,
            never_zero=self._by_probability,
        )
