"""Iterations that one CUDA graph holds: all microbatches, forward and backward.

Megatron runs some iterations eagerly, captures one, and from then on replays it. A replay runs no
Python. So the iteration begins where DDP zeroes gradients, outside of the graph: there the loads of
the last iteration are read, all layers are planned, and what the graph's kernels read is written:
tables of the quotas and of the transfers. Every launch is the same for every plan, because plans
cover all slots and all own experts (`TransferPlan.covered`).
"""

from __future__ import annotations

import torch

from megatron_hecate.device.autograd import lasting_tensors
from megatron_hecate.graphs.monitor import GraphedMonitor
from megatron_hecate.megatron.cuda_graphs import replays
from megatron_hecate.step.prefetch import Prefetcher


class GraphedIteration:
    """Preparation of each iteration of one model that Megatron may replay.

    Args:
        prefetcher: prefetcher of the model's layers.
    """

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        # Iterations that Megatron had run by graphs when the running one began.
        self._replays = 0
        states = prefetcher.states
        tables = [state.rerouter.tables for state in states]
        size = max(table.shape.holders_size for table in tables)
        # The quotas' tables of all layers on the host, which one copy writes to the device. It is
        # over when the next iteration begins, because the loads have been read.
        device = tables[0].device
        with lasting_tensors():
            self._numbers = torch.zeros(
                (len(states), size), dtype=torch.int32, pin_memory=device.type == "cuda"
            )
            self._holders = self._numbers.to(device, copy=True)
        for state, table, row in zip(states, tables, self._holders, strict=True):
            state.rerouter.separate_homes(state.homes)
            table.move(row)

    @property
    def is_waiting(self) -> bool:
        """True if nothing has run since the last call of `prepare`, neither replay nor forward."""
        clock = self._prefetcher.clock
        return (
            clock.begun == clock.iteration
            and replays() == self._replays
            and not any(map(clock.is_in, range(len(self._prefetcher.states))))
        )

    def prepare(self) -> None:
        """Begin the next iteration: read loads, plan all layers, write the tables. Collective."""
        prefetcher = self._prefetcher
        monitor = prefetcher.monitor
        assert isinstance(monitor, GraphedMonitor)
        self._replays = count = replays()
        if count and not prefetcher.pool.layers:
            raise RuntimeError(
                "FSSDP: memory of replicas was released, which Megatron's CUDA graph of iterations "
                "uses; call reset_cuda_graph() of Megatron's FullCudaGraphWrapper as well"
            )
        clock = prefetcher.clock
        clock.begin()
        states = prefetcher.states
        for row, state in zip(self._numbers.numpy(), states, strict=True):
            prefetcher.planner.plan(state, prefetcher.forecast)
            tables = state.rerouter.tables
            tables.placed = state.placement
            numbers = tables.numbers(state.placement)
            row[: len(numbers)] = numbers
        self._holders.copy_(self._numbers, non_blocking=True)
        plans = {state.name: state.current.transfers for state in states}
        states[0].transport.write({name: plan for name, plan in plans.items() if plan is not None})
        monitor.prepare(replays=count > 0)
        if count:
            prefetcher.planner.early.start(
                states, monitor, prefetcher.meter, clock.counted_microbatches or 1
            )
