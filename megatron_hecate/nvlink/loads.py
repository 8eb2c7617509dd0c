"""Exchange of the loads of all sources by the kernels after the gate (``kernels/loads.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.comm.transport import LayerBuffer, LoadExchange
from megatron_hecate.device.autograd import lasting_tensors
from megatron_hecate.nvlink.memory import SharedLayout, aligned_bytes
from megatron_hecate.nvlink.peers import Peers
from megatron_hecate.nvlink.tables import most_stripes


class SharedLoads:
    """Memory of a domain in which its ranks exchange loads, for all layers.

    Args:
        peers: the domain, with one source per rank.
        memory: [`nbytes`] uint8 of the peers' buffers, at the same offset on all ranks.
    """

    def __init__(self, peers: Peers, memory: Tensor) -> None:
        self._peers = peers
        self._most = memory.nbytes // 2
        description = peers.signals.of_exchange(memory.data_ptr(), self._most).view(np.uint8)
        with lasting_tensors():
            self._description = torch.from_numpy(description).to(peers.device)
        self._exchanges: dict[str, LoadExchange] = {}

    @staticmethod
    def nbytes(layers: Sequence[LayerBuffer], num_ranks: int) -> int:
        """Return the bytes for two exchanges of the layer with the most experts."""
        most = max((layer.homes for layer in layers if layer.slots), default=0)
        return 2 * aligned_bytes(4 * most * num_ranks**2)

    def exchange(self, num_experts: int, *, label: str) -> LoadExchange:
        """Return the exchange of a layer's loads, see `Transport.exchange_loads`."""
        peers = self._peers
        peers.raise_failure()
        if label not in self._exchanges:
            num_ranks = len(peers.ranks)
            assert 4 * num_experts * num_ranks <= self._most, (label, num_experts, self._most)
            signals = peers.signals
            number = peers.remember_layer(
                f"{label}: the exchange of loads failed on rank {signals.rank} of {num_ranks} "
                f"(timeout {signals.timeout:g} s): expected rank {{peer}} to send its loads"
            )
            self._exchanges[label] = LoadExchange(self._description, number, peers.raise_failure)
        return self._exchanges[label]


def shared_bytes(layers: Sequence[LayerBuffer], domains: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes that peers read, for the largest layers: of transfers, and of loads.

    Args:
        layers: sizes of the layers.
        domains: number of ranks of each NVLink domain.
    """
    size = 0
    for layer in layers:
        if layer.slots:
            in_fetch, in_return = most_stripes(layer, domains)
            fetch = SharedLayout.of_fetch(layer.homes, layer.chunk_bytes, min(domains))
            back = SharedLayout.of_return(layer.slots, layer.elements, min(domains))
            size = max(size, fetch.size(in_fetch), back.size(in_return))
    # Only inside one domain do kernels exchange loads.
    return size, SharedLoads.nbytes(layers, domains[0]) if len(domains) == 1 else 0
