"""Replicas and their gradients, without Megatron. Oracle: autograd without replicas; numbers computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transport import LayerBuffer, TransferPlan
from megatron_hecate.plan import Placement
from megatron_hecate.replicas.buffers import LIFETIMES, BufferPool, ReplicaSlots
from megatron_hecate.replicas.chunk_layout import ChunkLayout
from megatron_hecate.replicas.layer_replicas import Replicas


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

    is_last = False

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
    pool = BufferPool(transport, lifetime)
    pool.allocate(layers, torch.device("cpu"))
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
