"""Guests and slot memory under random schedules. Oracle: a plain model of who owns what.

The schedules drive `Guests` and `SlotMemory` with transfers that move nothing until they are waited for: guests that
are used too early, memory that has two owners, or a gradient that is overwritten on its way show as wrong numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_hecate import slots
from megatron_hecate.lend import ChunkLayout, Delivery
from megatron_hecate.materialization import Materialization
from megatron_hecate.memory import LIFETIMES, Need, SlotMemory
from megatron_hecate.plan import Placement
from megatron_hecate.slots import Guests, LayerSlots

CPU = torch.device("cpu")
SCHEDULES = 2100


class _Wire:
    """Transfers that move nothing before they are waited for, and watch the memory they use."""

    def __init__(self) -> None:
        self.pending: list[_FakeTransfer] = []
        self.fetches: list[str] = []
        self.arrived: list[tuple[str, list[list[float]]]] = []  # gradients at home
        self.step = 0

    def value(self, layer: int, expert: int) -> float:
        """What every weight of ``expert`` is in this iteration."""
        return 1000.0 * self.step + 100 * layer + expert + 1

    def start_gather(self, homes, route, guests, group, *, fused, label, timeout, timed=False) -> _FakeTransfer:
        self.fetches.append(label)
        values = [self.value(int(label), e) for e in route.experts]
        return _FakeTransfer(self, list(guests), lambda: [g.fill_(v) for g, v in zip(guests, values, strict=True)])

    def start_reduce(self, grads, route, staging, add, group, *, fused, totals, label, timeout) -> _FakeTransfer:
        sent = [g.tolist() for g in grads]

        def arrive() -> None:
            assert [g.tolist() for g in grads] == sent, f"layer {label}: gradients changed on their way"
            self.arrived.append((label, sent))

        return _FakeTransfer(self, [*grads, *staging], arrive)


class _FakeTransfer:
    def __init__(self, wire: _Wire, uses: list[Tensor], finish: Callable[[], object]) -> None:
        self.wire, self.finish, self.seconds = wire, finish, None
        self.ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in uses]
        for other in wire.pending:
            for a, b in self.ranges:
                assert all(b <= c or d <= a for c, d in other.ranges), "two transfers use the same memory"
        wire.pending.append(self)

    def wait(self) -> None:
        if self in self.wire.pending:
            self.wire.pending.remove(self)
            self.finish()


class _Run:
    """One random model and its schedule."""

    def __init__(self, seed: int, wire: _Wire) -> None:
        self.rng, self.wire = random.Random(seed), wire
        rng = self.rng
        self.lifetime = rng.choice(list(LIFETIMES))
        self.layers, self.passes, self.microbatches = rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 5)
        self.ahead, self.block = rng.random() < 0.5, rng.choice([0, 0, 1, 2, 3])  # block: layers recomputed together
        needs = [Need(slots=2, elements=rng.randint(1, 9), dtype=torch.float32) for _ in range(self.layers)]
        self.arena = SlotMemory(needs, self.lifetime, in_flight=self.passes * self.layers, device=CPU)
        self.homes = [torch.nn.Parameter(torch.zeros(n.elements)) for n in needs]
        self.slots = [
            LayerSlots(
                index=i,
                homes=lambda i=i: [[self.homes[i]]],
                layout=ChunkLayout((torch.Size([need.elements]),), (False,)),
                group=None,
                memory=self.arena,
                ready=lambda: None,
                label=str(i),
                timeout=1,
            )
            for i, need in enumerate(needs)
        ]
        self.frames: dict[int, int] = {}  # the model for lifetime layer: who was fetched last into which frame
        self.fetches = 0

    def iteration(self) -> None:
        self.wire.step += 1
        self.arena.reset()
        self.frames.clear()
        self.guests: dict[tuple[int, int], Guests] = {}
        self.sums: dict[int, list[list[float]]] = {}
        self.wire.fetches.clear()
        self.wire.arrived.clear()
        self.expected: list[tuple[str, list[list[float]]]] = []
        self.fetches = 0
        homes = Placement.initial(6, 3, num_slots=2)
        self.plans = []
        for _ in range(self.layers):
            guests = [(e, 0) for e in self.rng.sample([2, 3, 4, 5], self.rng.randint(0, 2))] or [(0, 1)]
            self.plans.append(Materialization.of(homes.with_guests(guests), 0))
        gives_up = self.rng.random() < 0.2
        in_flight: list[int] = []
        forwarded = 0
        while forwarded < self.microbatches or in_flight:
            can = forwarded < self.microbatches and len(in_flight) < self.passes
            if can and (not in_flight or self.rng.random() < 0.5):
                for layer in range(self.layers):
                    self.forward(layer, forwarded)
                in_flight.append(forwarded)
                forwarded += 1
            else:
                self.backward(in_flight.pop(0))
            if gives_up and self.rng.random() < 0.3:
                return
        self.check_end()

    def at(self, layer: int, microbatch: int) -> Guests:
        key = (layer, 0 if self.lifetime == "iteration" else microbatch)
        if key not in self.guests:
            per_iteration = self.lifetime == "iteration"
            self.guests[key] = Guests(
                self.slots[layer],
                self.plans[layer],
                microbatches=self.microbatches if per_iteration else 1,
                before_backward=self.before_backward if self.lifetime == "layer" else None,
                after_backward=None if per_iteration else lambda g: self.arena.free(g.frame),
            )
            if self.lifetime != "layer":
                self.fetches += 1
        return self.guests[key]

    def start(self, layer: int, microbatch: int) -> None:
        guests = self.at(layer, microbatch)
        if self.lifetime == "layer" and self.frames.get(layer % 2) != layer:
            self.frames[layer % 2] = layer
            self.fetches += 1
        guests.start()

    def forward(self, layer: int, microbatch: int) -> None:
        if self.lifetime == "layer" and self.rng.random() < 0.1:
            self.start(self.rng.randrange(self.layers), microbatch)  # for nothing: it may be dropped on its way
        self.start(layer, microbatch)
        if self.ahead and layer + 1 < self.layers:
            self.start(layer + 1, microbatch)
        self.use(layer, microbatch)

    def use(self, layer: int, microbatch: int) -> None:
        guests = self.at(layer, microbatch)
        guests.start()
        guests.wait()
        chunks = guests.weights()
        assert len(chunks) == 2
        for expert, chunk in zip(guests.what.route.experts, chunks, strict=False):
            assert chunk.tolist() == [self.wire.value(layer, expert)] * len(chunk)

    def before_backward(self, guests: Guests) -> None:
        guests.start()
        layer = guests.slots.index
        if layer > 0 and self.rng.random() < 0.7:
            self.start(layer - 1, self.current)

    def backward(self, microbatch: int) -> None:
        self.current = microbatch
        layers = list(reversed(range(self.layers)))
        blocks = [layers[i : i + self.block] for i in range(0, len(layers), self.block)] if self.block else [layers]
        for block in blocks:
            for layer in reversed(block) if self.block else []:
                self.forward_again(layer, microbatch)
            deliveries = []
            for layer in block:
                deliveries.append((layer, self.layer_backward(layer, microbatch)))
                while deliveries and self.rng.random() < 0.8:
                    deliveries.pop(0)[1].complete([None])
            for _, delivery in deliveries:
                delivery.complete([None])

    def forward_again(self, layer: int, microbatch: int) -> None:
        self.start(layer, microbatch)
        self.use(layer, microbatch)

    def layer_backward(self, layer: int, microbatch: int) -> Delivery:
        guests = self.at(layer, microbatch)
        if self.lifetime == "layer":
            self.start(layer, microbatch)
        guests.prepare_backward()
        if self.lifetime != "layer" or self.frames[layer % 2] == layer:
            self.use(layer, microbatch)
        grads = [
            None if self.rng.random() < 0.1 else torch.full_like(self.homes[layer], self.rng.randint(-9, 9))
            for _ in range(2)
        ]
        rows = [[0.0] * len(self.homes[layer]) if g is None else g.tolist() for g in grads[: guests.num_guests]]
        if self.lifetime == "iteration":
            before = self.sums.get(layer, [[0.0] * len(self.homes[layer])] * guests.num_guests)
            rows = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(before, rows, strict=True)]
            self.sums[layer] = rows
        if self.lifetime != "iteration" or guests.backwards + 1 == self.microbatches:
            self.expected.append((str(layer), rows))
        delivery = Delivery([[self.homes[layer]]], guests.layout)
        guests.backward(delivery, grads)
        return delivery

    def check_end(self) -> None:
        self.arena.reset()
        assert not self.wire.pending, "a transfer was left alone"
        assert self.wire.arrived == self.expected
        assert len(self.wire.fetches) == self.fetches
        if self.lifetime == "microbatch":
            assert len(self.arena._free) == len(self.arena._weights)


def test_thousands_of_random_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = _Wire()
    monkeypatch.setattr(slots, "start_gather", wire.start_gather)
    monkeypatch.setattr(slots, "start_reduce", wire.start_reduce)
    kinds = set()
    for seed in range(SCHEDULES // 3):
        run = _Run(seed, wire)
        kinds.add((run.lifetime, run.ahead, run.block, run.passes))
        for iteration in range(3):
            try:
                run.iteration()
            except BaseException as error:
                error.add_note(f"seed {seed}, iteration {iteration}: {vars(run)}")
                raise
    assert len(kinds) > 60, "schedules are too alike"


def test_too_many_microbatches_in_flight_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every schedule that runs one more ahead than announced says so, at that forward and not before."""
    wire = _Wire()
    monkeypatch.setattr(slots, "start_gather", wire.start_gather)
    found = 0
    for seed in range(300):
        run = _Run(seed, wire)
        if run.lifetime != "microbatch":
            continue
        run.ahead, run.guests = False, {}
        run.plans = [Materialization.of(Placement.initial(6, 3, num_slots=2).with_guests([(2, 0)]), 0)] * run.layers
        for microbatch in range(run.passes):
            for layer in range(run.layers):
                run.forward(layer, microbatch)
        with pytest.raises(RuntimeError, match=rf"0: all {run.passes * run.layers} frames hold guests of microbatches"):
            run.forward(0, run.passes)
        run.arena.reset()
        run.guests.clear()
        run.forward(0, run.passes)  # and after a reset all is free
        run.arena.reset()
        found += 1
    assert found > 50 and not wire.pending


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_guests_that_were_dropped_cannot_be_used(lifetime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = _Wire()
    monkeypatch.setattr(slots, "start_gather", wire.start_gather)
    run = next(r for r in (_Run(seed, wire) for seed in range(99)) if r.lifetime == lifetime and r.layers > 2)
    run.guests = {}
    run.plans = [Materialization.of(Placement.initial(6, 3, num_slots=2).with_guests([(2, 0)]), 0)] * run.layers
    run.forward(0, 0)
    guests = run.at(0, 0)
    guests.wait()
    if lifetime == "layer":
        run.plans[2] = Materialization.of(Placement.initial(6, 3, num_slots=2).with_guests([(3, 0)]), 0)
        run.forward(2, 0)  # has the same frame
    else:
        run.arena.reset()
    with pytest.raises(RuntimeError, match=rf"0: guests are used after they were dropped \(lifetime {lifetime}\)"):
        guests.wait()
