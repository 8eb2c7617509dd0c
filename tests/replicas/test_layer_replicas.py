"""Replicas and their gradients, without Megatron. Oracle: autograd without replicas; numbers computed by hand."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transport import LayerBuffer, TransferPlan
from megatron_hecate.plan import Placement
from megatron_hecate.replicas.buffers import LIFETIMES, BufferPool
from megatron_hecate.replicas.chunk_layout import ChunkLayout
from megatron_hecate.replicas.layer_replicas import Replicas
from megatron_hecate.replicas.slots import ReplicaSlots


class _Experts:
    """Own experts of one parameter each."""

    delayed = None

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self.layout = ChunkLayout((parameters[0].shape,), (False,), is_grouped=True)
        self.weights_in = self.layout.views

    def homes(self) -> list[list[Parameter]]:
        return [[p] for p in self._parameters]

    stored = homes

    def home(self, index: int) -> list[Parameter]:
        return [self._parameters[index]]

    def wait_for_values(self) -> None: ...

    def drop_delayed(self) -> None: ...


class _Events:
    """Backwards as those of one iteration: gradients return where ``is_last``; dropped replicas are fetched again."""

    def __init__(self, *, is_last: bool = False) -> None:
        self.is_last = is_last

    def backward_begins(self, replicas: Replicas) -> None:
        replicas.start()

    def backward_ended(self, replicas: Replicas) -> None:
        pass

    def is_last_backward(self, *_: Any) -> bool:
        return self.is_last


def _slots(
    homes: Sequence[list[Parameter]],
    lifetime: str,
    group: Any = None,
) -> list[ReplicaSlots]:
    """One slot in every layer; an own expert has one parameter. All layers share the rank's buffers."""
    layers = [
        LayerBuffer(slots=1, elements=h[0].numel(), dtype=h[0].dtype, homes=len(h)) for h in homes
    ]
    transport = P2P(group or dist.group.WORLD, timeout=30)
    pool = BufferPool(transport, layers, lifetime, device=torch.device("cpu"))
    return [ReplicaSlots(i, _Experts(h), pool, f"layer {i + 1}") for i, h in enumerate(homes)]


@pytest.mark.fast
def test_parameters_that_cannot_be_one_chunk() -> None:
    def start(*weights: Parameter) -> None:
        (slots,) = _slots([list(weights)], "iteration", SimpleNamespace())
        placement = Placement.initial(2, 1, num_slots=0)
        Replicas(slots, placement, TransferPlan.from_placement(placement, 0), events=_Events())

    trained, half = Parameter(torch.ones(3)), Parameter(torch.ones(3, dtype=torch.bfloat16))
    frozen = Parameter(torch.ones(3), requires_grad=False)
    start(trained, trained)
    start(trained, frozen)
    types = r"layer 1: expert parameters have dtypes \['torch.bfloat16', 'torch.float32'\].* keeps to torch.float32"
    with pytest.raises(ValueError, match=types):
        start(trained, half)


@ranks(2)
def test_memory_of_an_aborted_iteration_is_freed() -> None:
    """Gradients of its first microbatch wait in the buffers when the job's attempt ends. Oracle: the life of the memory."""
    homes = [Parameter(torch.ones(4, 4))]
    (slots,) = _slots([homes], "iteration")
    memory = np.zeros(
        sum(len(b._memory) for b in (*slots.pool._weights, *slots.pool._grads)), np.uint8
    )
    freed = weakref.ref(memory)
    for buffer in (*slots.pool._weights, *slots.pool._grads):
        part, memory_left = memory[: len(buffer._memory)], memory[len(buffer._memory) :]
        buffer._memory = torch.from_numpy(part)
        memory = memory_left
    del part, memory_left, memory, buffer
    placement = Placement.initial(2, 2, num_slots=1).with_replicas([(0, 1), (1, 0)])
    plan = TransferPlan.from_placement(placement, dist.get_rank())
    replicas = Replicas(slots, placement, plan, events=_Events())
    x, (home, replica) = replicas.join(torch.ones(3, 4))
    replicas.computed_by(x @ home @ replica).sum().backward()
    assert replicas.is_accumulating
    del x, home, replica
    slots.pool.release()
    assert freed() is None


@pytest.mark.parametrize("lifetime", LIFETIMES)
@ranks(2)
def test_layers_of_different_size_share_buffers(lifetime: str) -> None:
    """Four layers, one home and one replica per rank and layer; both ranks' work without replicas, in one graph."""
    rank, shapes, microbatches = dist.get_rank(), [(4, 6), (6, 3), (3, 5), (5, 2)], 2

    def weight(layer: int, expert: int) -> Parameter:
        generator = torch.Generator().manual_seed(10 * layer + expert)
        return Parameter(torch.randint(-3, 4, shapes[layer], generator=generator).double())

    def tokens(of: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * of + microbatch)
        x = torch.randint(-3, 4, (7, 4), generator=generator).double()
        return x, (torch.arange(7) % 2 == 0)[:, None]

    full = [[weight(layer, expert) for expert in range(2)] for layer in range(4)]
    for of in range(2):
        for microbatch in range(microbatches):
            x, to_first = tokens(of, microbatch)
            for a, b in full:
                x = torch.where(to_first, x @ a, x @ b)
            x.sum().backward()

    homes = [weight(layer, rank) for layer in range(4)]
    slots = _slots([[home] for home in homes], lifetime)
    placement = Placement.initial(2, 2, num_slots=1).with_replicas([(0, 1), (1, 0)])

    def make_replicas() -> list[Replicas]:
        made = []
        for of_layer in slots:
            plan = TransferPlan.from_placement(placement, rank)
            made.append(Replicas(of_layer, placement, plan, events=events))
        return made

    events = _Events()
    replicas = make_replicas()
    for microbatch in range(microbatches):
        events.is_last = microbatch == microbatches - 1
        if microbatch and lifetime != "iteration":
            replicas = make_replicas()
        x, to_first = tokens(rank, microbatch)
        for of_layer in replicas:
            x, (home, replica) = of_layer.join(x)
            a, b = (home, replica) if rank == 0 else (replica, home)
            x = of_layer.computed_by(torch.where(to_first, x @ a, x @ b))
        x.sum().backward()
    for layer, home in enumerate(homes):
        assert torch.equal(home.grad, full[layer][rank].grad)


@ranks(2)
def test_a_late_plan_may_take_a_replica_and_give_none() -> None:
    """Rank 0's replica is replaced, rank 1's goes; gradients still return to the homes."""
    rank = dist.get_rank()
    weights = [Parameter(torch.full((3,), float(e))) for e in (2 * rank, 2 * rank + 1)]
    (slots,) = _slots([weights], "iteration")
    homes = Placement.initial(4, 2, num_slots=1)
    planned = homes.with_replicas([(2, 0), (0, 1)])
    transfers = TransferPlan.from_placement(planned, rank)
    replicas = Replicas(slots, planned, transfers, events=_Events(is_last=True))
    replicas.start()
    replicas.wait()
    (fetched,) = replicas.buffer.chunks(slots.sizes, torch.float32)
    assert fetched.tolist() == [2.0 if rank == 0 else 0.0] * 3
    late = homes.with_replicas([(3, 0)])
    replicas.add_late(late, TransferPlan.from_placement(late, rank))
    one, physical = replicas.join(torch.ones(()))
    assert len(physical) == 3
    if rank == 0:
        assert physical[2].tolist() == [3.0] * 3
    output = one * sum(w.sum() * (1 if k < 2 or rank == 0 else 0) for k, w in enumerate(physical))
    replicas.computed_by(output).backward()
    gradients = [1.0, 2.0] if rank == 1 else [1.0, 1.0]  # expert 3 was computed with on both ranks
    assert [w.grad.tolist() for w in weights] == [[g] * 3 for g in gradients]
