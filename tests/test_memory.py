"""Slot memory, and guests in it. Oracle: numbers computed by hand; autograd without guests.

``test_random_schedules`` checks who owns which frame when.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ranks import ranks
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate import memory
from megatron_hecate.lend import ChunkLayout
from megatron_hecate.materialization import Materialization
from megatron_hecate.memory import LIFETIMES, Frame, Frames, Need, SlotMemory
from megatron_hecate.plan import Placement
from megatron_hecate.slots import Guests, LayerSlots

CPU = torch.device("cpu")
SMALL = Need(slots=2, elements=100, dtype=torch.bfloat16)  # a chunk: 200 bytes of weights, 400 of gradients
LARGE = Need(slots=2, elements=65, dtype=torch.float32)  # 260 and 260


@pytest.mark.parametrize(
    ("needs", "lifetime", "in_flight", "frames"),
    [
        ([SMALL, LARGE], "iteration", 1, Frames((512, 1024), (1024, 1024), 2560)),
        ([SMALL, LARGE], "microbatch", 3, Frames((1024, 1024, 1024), (1024, 1024), 2560)),
        ([SMALL, LARGE, SMALL], "layer", 9, Frames((512, 1024), (1024, 1024), 2560)),
        ([SMALL], "layer", 1, Frames((512,), (1024,), 2560)),
        ([Need(slots=0, elements=100, dtype=torch.float32)] * 3, "iteration", 1, Frames((), (), 0)),
        ([Need(slots=1, elements=64, dtype=torch.float64)], "iteration", 1, Frames((512,), (512,), 2560)),
    ],
)
def test_frames_are_so_large(needs: list[Need], lifetime: str, in_flight: int, frames: Frames) -> None:
    assert Frames.of(needs, lifetime, in_flight=in_flight) == frames
    arena = SlotMemory(needs, lifetime, in_flight=in_flight, device=CPU)
    assert arena.frames.total == sum(frames.weights) + sum(frames.grads) + frames.staging


def test_more_microbatches_in_flight_than_the_schedule_has() -> None:
    arena = SlotMemory([SMALL, LARGE], "microbatch", in_flight=2, device=CPU)
    first = arena.weights(0, label="layer 1")
    arena.weights(1, label="layer 2")
    with pytest.raises(RuntimeError, match=r"layer 1: all 2 frames hold guests of microbatches whose backward has not"):
        arena.weights(0, label="layer 1")
    arena.free(first)
    assert arena.weights(1, label="layer 2") is first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_development_mode_poisons_what_is_dropped(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "sys", SimpleNamespace(flags=SimpleNamespace(dev_mode=True)))
    frame = Frame(torch.zeros(1024, dtype=torch.uint8))
    chunks = frame.chunks(2, 100, dtype)
    assert not any(c.isnan().any() for c in chunks)
    frame.hold("somebody")
    assert all(c.isnan().all() for c in chunks)


def test_chunks_lie_apart_and_count_versions_of_their_own() -> None:
    frame = Frame(torch.zeros(2048, dtype=torch.uint8)[512:])
    a, b = frame.chunks(2, 100, torch.float32)
    assert b.data_ptr() - a.data_ptr() == 512
    again, version = frame.chunks(2, 100, torch.float32)[0], a._version
    again.fill_(3.0)
    assert (a == 3).all() and (b == 0).all() and a._version == version


@pytest.mark.parametrize("lifetime", LIFETIMES)
@ranks(2)
def test_layers_of_different_size_share_frames(lifetime: str) -> None:
    """Four layers, one home and one guest per rank and layer. Oracle: both ranks' work without guests, in one graph."""
    import torch.distributed as dist

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
    needs = [Need(slots=1, elements=h.numel(), dtype=h.dtype) for h in homes]
    arena = SlotMemory(needs, lifetime, in_flight=4, device=CPU)
    plan = Placement.initial(2, 2, num_slots=1).with_guests([(0, 1), (1, 0)])
    layers = [
        LayerSlots(
            index=i,
            homes=lambda h=h: [[h]],
            layout=ChunkLayout((h.shape,), (False,)),
            group=dist.group.WORLD,
            memory=arena,
            ready=lambda: None,
            label=f"layer {i + 1}",
            timeout=30,
        )
        for i, h in enumerate(homes)
    ]
    what = [Materialization.of(plan, rank) for _ in layers]

    def host(i: int) -> Guests:
        if lifetime == "iteration":
            return Guests(layers[i], what[i], microbatches=microbatches)
        again = Guests.start if lifetime == "layer" else None
        return Guests(layers[i], what[i], before_backward=again, after_backward=lambda g: arena.free(g.frame))

    guests = [host(i) for i in range(4)]
    for microbatch in range(microbatches):
        if microbatch and lifetime != "iteration":
            guests = [host(i) for i in range(4)]
        x, to_first = tokens(rank, microbatch)
        for g in guests:
            (home,), (guest,) = g.materialize()
            a, b = (home, guest) if rank == 0 else (guest, home)
            x = g.computed_by(torch.where(to_first, x @ a, x @ b))
        x.sum().backward()
    for layer, home in enumerate(homes):
        assert torch.equal(home.grad, full[layer][rank].grad)
